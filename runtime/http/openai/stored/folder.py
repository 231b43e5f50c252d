"""The folder of --file-storage-path: its lock, its private files, and the quarantine of damaged ones.

    FOLDER/lock                    held by the one server that uses the folder
    FOLDER/file-ID, file-ID.json   bytes and metadata of files
    FOLDER/batches/ID.json         records of batches
    FOLDER/uploads/ID.json, PART   records of uploads that are not complete, and the bytes of their parts
    FOLDER/responses.sqlite        stored responses
    FOLDER/conversations.sqlite    conversations
    FOLDER/quarantine/             what was found damaged, moved there as it was

Files are readable by the server's user alone (0600), and so are the folders that the server makes (0700).
Everything here blocks; Disk runs it in threads.
"""

import fcntl
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from runtime import log
from runtime.errors import StartError, StorageUnavailable

MAX_RECORD_BYTES = 2**20  # of a .json file; ours have a few hundred bytes
SUBFOLDERS = ("batches", "uploads")
OURS = (
    "lock",
    "file-*",
    "responses.sqlite*",
    "conversations.sqlite*",
    "batches",
    "batches/*",
    "quarantine",
    "quarantine/*",
)
T = TypeVar("T")


class Folder:
    """A folder that is locked for this server."""

    def __init__(self, path: Path, on_damage: Callable[[], None]) -> None:
        """`on_damage` is called for everything that is moved to quarantine. Raises StartError when the folder
        can't be used."""
        self.path = path
        self._on_damage = on_damage
        self._relocking = threading.Lock()
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not stat.S_ISREG(_mode(path / "lock", missing=stat.S_IFREG)):
                self.quarantine(path / "lock", "it is no file")
            self._lock = _lock(path / "lock")
            self._make_subfolders()
            self._close_to_others()
        except BlockingIOError:
            raise StartError(
                f"--file-storage-path {path} is in use by another server; give each its own folder"
            ) from None
        except OSError as error:
            raise StartError(
                f"--file-storage-path {path} can't be used ({error}); name a folder that can be written"
            ) from None
        if path.stat().st_mode & 0o077:  # it may be a folder of other things, too
            log.get("files").warning(
                "the folder is open to other users of this machine; chmod 700 closes it", folder=str(path)
            )

    def close(self) -> None:
        """Unlocks the folder."""
        os.close(self._lock)

    def check(self) -> None:
        """Raises StorageUnavailable while the folder is gone, as with a mount that has left. A folder that
        stands in its place later is locked again. Raises OSError."""
        with self._relocking:
            held = os.fstat(self._lock)
            with suppress(FileNotFoundError):
                found = os.stat(self.path / "lock")
                if (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino):
                    return
            if not self.path.is_dir():
                raise StorageUnavailable("the folder of --file-storage-path is gone; put it back")
            try:
                lock = _lock(self.path / "lock")
            except BlockingIOError:
                raise StorageUnavailable(
                    "the folder of --file-storage-path is in use by another server now; restart one of them"
                ) from None
            os.close(self._lock)
            self._lock = lock
            self._make_subfolders()

    def quarantine(self, path: Path, reason: str) -> None:
        """Moves a damaged file or folder aside, or leaves it where it is if that is not possible; the log
        says which."""
        folder = self.path / "quarantine"
        place: Path | None = None
        try:
            _make_folder(folder)
            place = next(
                one
                for number in count()
                if not os.path.lexists(one := folder / (f"{path.name}.{number}" if number else path.name))
            )
            os.rename(path, place)
        except OSError as error:
            place = None
            reason += f"; it can't be moved: {error.strerror}"
        self.report(
            str(path.relative_to(self.path)),
            reason,
            "it was left where it is" if place is None else f"moved to {place.relative_to(self.path)}",
        )

    def report(self, name: str, reason: str, outcome: str) -> None:
        """Counts and logs a damaged part of stored objects. `outcome` says where it is now."""
        self._on_damage()
        log.get("files").error(
            "damaged, and not served: a part of the stored objects is in quarantine",
            name=name,
            reason=reason,
            outcome=outcome,
        )

    def read_record(self, path: Path, kind: type[T], id_of: Callable[[T], str]) -> T | None:
        """The record in a .json file whose name is the record's id; None for a damaged one, which goes to
        quarantine."""
        try:
            mode = os.lstat(path)
            if not stat.S_ISREG(mode.st_mode):
                reason = "it is no file"
            elif mode.st_size > MAX_RECORD_BYTES:
                reason = f"a record of {mode.st_size} bytes"
            else:
                record = msgspec.json.decode(path.read_bytes(), type=kind)
                if id_of(record) == path.stem:
                    return record
                reason = "the record has another id"
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
        self.quarantine(path, reason)
        return None

    def _close_to_others(self) -> None:
        """Takes what is ours away from other users: an earlier version, or a copy, may have left it open."""
        for path in [path for pattern in OURS for path in self.path.glob(pattern)]:
            mode = os.lstat(path).st_mode
            if mode & 0o077 and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                with suppress(OSError):  # a read-only disk
                    os.chmod(path, stat.S_IMODE(mode) & 0o700)

    def _make_subfolders(self) -> None:
        for name in SUBFOLDERS:
            path = self.path / name
            if not stat.S_ISDIR(_mode(path, missing=stat.S_IFDIR)):
                self.quarantine(path, "it is no folder")
            _make_folder(path)


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file that only this user can read. Follows no links. Raises OSError."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def writing(path: Path) -> BinaryIO:
    """A new file, open for writing. Raises OSError."""
    return os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


def write_all(file: int, data: bytes | bytearray) -> None:
    """Writes all of `data`. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces the content of `path`: readers and crashes see the old content or the new one, and so they do
    after an error. Raises OSError."""
    part = path.with_name(path.name + ".part")
    try:
        file = open_private(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def append_lines(path: Path, data: bytes) -> None:
    """Appends whole lines. After an error, the file is as it was; where even that fails, its last line is
    incomplete, and the next call cuts it off. Raises OSError."""
    file = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            size = _end_of_lines(file, size)
            os.ftruncate(file, size)
        os.lseek(file, size, os.SEEK_SET)
        try:
            write_all(file, data)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def is_regular(path: Path) -> bool:
    """Whether there is a file, and not a folder, link or pipe. Raises OSError."""
    return stat.S_ISREG(_mode(path, missing=0))


def _end_of_lines(file: int, size: int) -> int:
    """The position after the last line break before `size`."""
    while size:
        begin = max(0, size - 2**16)
        found = os.pread(file, size - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        size = begin
    return 0


def _mode(path: Path, *, missing: int) -> int:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return missing


def _make_folder(path: Path) -> None:
    path.mkdir(exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def _lock(path: Path) -> int:
    """A locked descriptor. Raises BlockingIOError when another server has it, OSError."""
    try:
        file = open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError:  # a read-only disk: what is stored can be read all the same
        file = open_private(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file
