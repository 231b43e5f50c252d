"""/v1/files: files of clients, and the input and output of batches.

A file is two files in the folder: NAME has its bytes and NAME.json its metadata. NAME.json is written last
and atomically, and makes the file exist; bytes without metadata, left by a killed server, are removed at the
next start.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import anyio
import msgspec
from msgspec import Struct

from runtime import log
from runtime.errors import InvalidRequest, NotFound, RequestError, StartError

MAX_FILE_BYTES = 512 * 2**20  # OpenAI's own limit
PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")
LIST_LIMIT = 10_000


class StorageFull(RequestError):
    """The file storage has reached its limit."""

    status, type, code = 507, "server_error", "storage_full"


class File(Struct, frozen=True, kw_only=True):
    """OpenAI's file object."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int  # unix seconds
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


def new_id(kind: str) -> str:
    """A new id in OpenAI's form: file-…, batch_…, resp_…"""
    return f"{kind}{'-' if kind == 'file' else '_'}{uuid4().hex}"


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces the content of `path`: readers and crashes see the old content or the new one."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


class Files:
    """The files of one folder. Methods that touch the disk block: call them in a worker thread."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises StartError when the folder can't be used."""
        self.folder = folder
        self.max_bytes = max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            files = [file for path in folder.glob("file-*.json") if (file := _read(path)) is not None]
            self.known = {
                file.id: file for file in sorted(files, key=lambda file: (file.created_at, file.id))
            }
        except OSError as error:
            raise StartError(
                f"--file-storage-path {folder} can't be used ({error}); name a folder that can be written"
            ) from None

    def sweep(self, keep: Iterable[str]) -> None:
        """Removes bytes without metadata that a killed server left behind, except those of the ids in `keep`.
        Only while nothing writes."""
        wanted = {*self.known, *keep}
        for path in self.folder.glob("file-*"):
            if path.suffix != ".json" and path.name not in wanted:
                path.unlink()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.known.values())

    def path(self, file_id: str) -> Path:
        """The path of a file's bytes, whether they exist or not."""
        return self.folder / file_id

    def find(self, file_id: str) -> File:
        """The metadata of a file. Raises NotFound."""
        file = self.known.get(file_id)
        if file is None:
            raise NotFound(f"there is no file {file_id[:80]}", param="file_id")
        return file

    def save(self, source: BinaryIO, filename: str, purpose: str) -> File:
        """Copies `source` into a new file. Raises InvalidRequest, StorageFull."""
        if purpose not in PURPOSES:
            raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
        size = source.seek(0, os.SEEK_END)
        if self.num_bytes + size > self.max_bytes:
            remedy = "delete some" if size <= self.max_bytes else "send smaller ones"
            raise StorageFull(
                f"{self.num_bytes} bytes are stored already, this file has {size}, and this server stores "
                f"{self.max_bytes} (--file-storage-bytes); {remedy}"
            )
        source.seek(0)
        file_id = new_id("file")
        try:
            with self.path(file_id).open("wb") as target:
                while piece := source.read(2**20):
                    target.write(piece)
                target.flush()
                os.fsync(target.fileno())
            return self.adopt(file_id, filename, purpose)
        except OSError as error:
            self.path(file_id).unlink(missing_ok=True)  # a full disk would stay full of it
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StorageFull("the disk of --file-storage-path is full; delete some files") from None

    def adopt(self, file_id: str, filename: str, purpose: str) -> File:
        """Makes a file of the bytes that exist at `path(file_id)`."""
        size = self.path(file_id).stat().st_size
        file = File(
            id=file_id, bytes=size, created_at=int(time.time()), filename=filename[-255:], purpose=purpose
        )
        write_atomically(self.folder / f"{file_id}.json", msgspec.json.encode(file))
        self.known[file_id] = file
        return file

    def delete(self, file_id: str) -> None:
        """Deletes a file. Raises NotFound."""
        self.find(file_id)
        del self.known[file_id]
        (self.folder / f"{file_id}.json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def page(self, *, after: str | None, limit: int, order: str, purpose: str | None) -> dict[str, Any]:
        """A page of the files, as OpenAI's list object."""
        files = [file for file in self.known.values() if purpose is None or file.purpose == purpose]
        return page_of(files, after=after, limit=limit, order=order)


def page_of(
    items: list[Any],
    *,
    after: str | None,
    limit: int,
    order: str,
    id_of: Callable[[Any], str] = attrgetter("id"),
) -> dict[str, Any]:
    """A page of `items`, which are the oldest first: those after the item with the id `after`; the newest
    first unless `order` is "asc". Raises InvalidRequest for an unknown `after`."""
    if order != "asc":
        items = items[::-1]
    if after is not None:
        ids = [id_of(item) for item in items]
        if after not in ids:
            raise InvalidRequest(f"after names nothing in this list: {after[:80]}", param="after")
        items = items[ids.index(after) + 1 :]
    data = items[:limit]
    ends = (
        {"first_id": id_of(data[0]), "last_id": id_of(data[-1])}
        if data
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": data, "has_more": len(items) > limit, **ends}


def _read(path: Path) -> File | None:
    """The metadata in a .json file of the folder; None when it is not ours or its bytes are missing."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=File)
    except msgspec.MsgspecError as error:
        log.get("files").warning(
            "a record in the file storage can't be read, and is left alone", path=path.name, error=str(error)
        )
        return None
    bytes_path = path.with_suffix("")
    return (
        file
        if bytes_path.name == file.id and bytes_path.is_file() and bytes_path.stat().st_size == file.bytes
        else None
    )


async def in_thread(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a blocking call in a worker thread."""
    return await anyio.to_thread.run_sync(lambda: call(*args, **kwargs))
