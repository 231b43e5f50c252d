"""Files that file: URLs name, within the folder that the operator allows."""

import os
from io import BufferedReader
from pathlib import Path

from runtime.errors import Forbidden, InvalidRequest
from runtime.media.spool import too_large
from runtime.media.url import file_path
from runtime.regular_file import open_regular


def open_local(url: str, param: str, folder: str | None, max_bytes: int) -> BufferedReader:
    """The file, opened for reading. What counts is where it lies when it is open, whatever links lead there.
    Raises Forbidden where no folder is allowed, InvalidRequest. For a worker thread."""
    if folder is None:
        raise Forbidden(
            f"{param}: files of the server are not read here; send the file itself as a data URL "
            "(--allowed-local-media-path names a folder that may be read)",
            param=param,
        )
    path = file_path(url, param)
    # before it is opened: opening alone tells whether a file exists
    if not _lies_in(Path(os.path.realpath(path)), folder):
        raise _outside(param)
    try:
        file = open_regular(path)
    except OSError as error:
        raise InvalidRequest(f"{param}: the file cannot be read: {error.strerror}", param=param) from None
    try:
        if not _lies_in(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")), folder):
            raise _outside(param)
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise too_large(param, max_bytes)
    except BaseException:
        file.close()
        raise
    return file


def _lies_in(path: Path, folder: str) -> bool:
    return Path(os.path.realpath(folder)) in path.parents


def _outside(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param}: the file is not in the folder that may be read (--allowed-local-media-path)", param=param
    )
