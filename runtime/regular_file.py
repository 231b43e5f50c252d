"""Files that are read at start or named by clients: opened only if they are regular files.

Opening a FIFO waits for a writer, and reading a device such as /dev/zero does not end; neither can be
cancelled. So a file is opened without waiting, and looked at before it is read.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MAX_BYTES = 1 << 28  # of a file that is read as a whole
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str | Path) -> BufferedReader:
    """The file, opened for reading. Raises OSError, also for what is no regular file and for a name that no
    file can have; its `strerror` is for the user."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a null character, or half a surrogate pair
        raise OSError(errno.EINVAL, f"no file has such a name: {error}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'special')}, not a regular file")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a file. Raises OSError as `open_regular`, and for a file of more than `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes")
    return data


def check_regular(path: str | Path) -> None:
    """Raises OSError as `open_regular`: for files that a library opens by name."""
    open_regular(path).close()


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file. Raises OSError as `read_regular`, UnicodeDecodeError."""
    return read_regular(path, max_bytes).decode()


def check_writable(folder: Path) -> None:
    """Raises OSError for a folder that cannot be made or written to; makes nothing."""
    for path in (folder, *folder.parents):
        if path.is_dir():
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "permission denied", str(path))
            return
        if path.exists() or path.is_symlink():
            code = errno.EEXIST if path == folder else errno.ENOTDIR
            raise OSError(code, os.strerror(code), str(folder))
