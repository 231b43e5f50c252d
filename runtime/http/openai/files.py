"""/v1/files: files of clients, and the input and output of batches.

A file is two files in the folder: NAME has its bytes and NAME.json its metadata. NAME.json is written last
and atomically, and makes the file exist; bytes without metadata, left by a killed server, are removed at the
next start. What is damaged goes to quarantine (stored/folder.py) and is not served.
"""

import os
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Annotated as A
from typing import TypeVar
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct

from runtime.errors import InvalidRequest, NotFound, StorageFull, StorageUnavailable
from runtime.http.openai.stored.disk import Disk
from runtime.http.openai.stored.folder import Folder, is_regular, open_private, write_atomically
from runtime.http.openai.stored.quota import Quota
from runtime.json_value import Fields
from runtime.messages.tenants import Tenant

MAX_FILE_BYTES = 512 * 2**20  # OpenAI's own limit
PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")
MAX_FILES = 100_000
LIST_LIMIT = 10_000
MAX_READ_BYTES = 2**18  # of a file that is sent, at once

FileId = A[str, Meta(pattern=r"^file-[0-9A-Za-z_-]+$")]  # is also the name of a file on disk


class File(Struct, frozen=True, kw_only=True):
    """OpenAI's file object."""

    id: FileId
    object: str = "file"
    bytes: A[int, Meta(ge=0)]
    created_at: int  # unix seconds
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


class StoredFile(File, frozen=True, kw_only=True):
    """A file as it is stored. `owner` is the name of its tenant; "": it was stored by a server without
    keys, or before files had owners."""

    owner: str = ""

    def shown(self) -> File:
        """What clients see."""
        return File(**{name: getattr(self, name) for name in File.__struct_fields__})


def new_id(kind: str) -> str:
    """A new id in OpenAI's form: file-…, batch_…, resp_…"""
    return f"{kind}{'-' if kind == 'file' else '_'}{uuid4().hex}"


class Files:
    """The files of one folder. Methods that block say so."""

    def __init__(self, disk: Disk, quota: Quota) -> None:
        """Blocking."""
        self.disk = disk
        self.folder = disk.folder.path
        self.quota = quota
        files = [
            file
            for path in sorted(self.folder.glob("file-*.json"))
            if (file := _read(disk.folder, path)) is not None
        ]
        self.known: dict[str, StoredFile] = {}
        self._num_of = Counter[str]()  # by owner
        for file in sorted(files, key=lambda file: (file.created_at, file.id)):
            self.add(file)
            quota.add(file.bytes, file.owner)

    def sweep(self, keep: Iterable[str], *, deletes: bool) -> None:
        """Removes what killed servers left behind: bytes without metadata, except those of the ids in `keep`,
        and incomplete records. Without `deletes`, bytes go to quarantine: a damaged record may be about them.
        Blocking; only while nothing writes."""
        wanted = {*self.known, *keep}
        for path in [*self.folder.glob("file-*"), *self.folder.glob("batches/*.part")]:
            if path.suffix == ".json" or path.name in wanted:
                continue
            if path.suffix == ".part" and is_regular(path):
                path.unlink(missing_ok=True)
            elif not is_regular(path):
                self.disk.folder.quarantine(path, "it is no file")
            elif deletes:
                path.unlink(missing_ok=True)
            else:
                self.disk.folder.quarantine(
                    path, "bytes without metadata, while a record of a batch is damaged"
                )

    def path(self, file_id: str) -> Path:
        """The path of a file's bytes, whether they exist or not."""
        return self.folder / file_id

    def add(self, file: StoredFile) -> None:
        """A file exists from now on."""
        self.known[file.id] = file
        self._num_of[file.owner] += 1

    def check_number(self, tenant: Tenant) -> None:
        """Raises StorageFull when a tenant may store no further file, however small."""
        num_own = self._num_of[tenant.name]
        if len(self.known) >= MAX_FILES or num_own >= tenant.most(MAX_FILES):
            raise StorageFull(f"as many files are stored as may be, {num_own} of them yours; delete some")

    def find(self, file_id: str, tenant: Tenant, param: str = "file_id") -> StoredFile:
        """The metadata of a file. Raises NotFound, also for a file of another tenant."""
        file = self.known.get(file_id)
        if file is None or not tenant.sees(file.owner):
            raise NotFound(f"there is no file {file_id[:80]}", param=param)
        return file

    def draft(self, file_id: str, size: int, filename: str, purpose: str, owner: str) -> StoredFile:
        """The metadata of a new file, which exists when it is written and added."""
        return StoredFile(
            id=file_id,
            bytes=size,
            created_at=int(time.time()),
            filename=filename[-255:],
            purpose=purpose,
            owner=owner,
        )

    def write(self, file: StoredFile) -> None:
        """Writes the metadata of a file, whose bytes are on the disk and in the quota already; the caller
        then adds it. Blocking. Raises OSError."""
        write_atomically(self.folder / f"{file.id}.json", msgspec.json.encode(file))

    def erase(self, file: StoredFile) -> None:
        """Reverts `write`. Blocking. Raises OSError."""
        (self.folder / f"{file.id}.json").unlink(missing_ok=True)

    async def delete(self, file_id: str, tenant: Tenant) -> None:
        """Deletes a file. Raises NotFound, StorageUnavailable."""
        file = self.find(file_id, tenant)
        await self.disk.run(lambda: self._unlink(file_id))
        if self.known.pop(file_id, None) is not None:  # else it was deleted twice at the same time
            self._num_of[file.owner] -= 1
            self.quota.give(file.bytes, file.owner)

    def _unlink(self, file_id: str) -> None:
        (self.folder / f"{file_id}.json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    async def open(self, file: File) -> "FileReader":
        """Opens the bytes of a file. Raises NotFound when they are gone, StorageUnavailable."""

        def opened() -> FileIO | None:
            try:
                return FileIO(open_private(self.path(file.id), os.O_RDONLY))
            except FileNotFoundError:
                return None

        def undo(bytes: FileIO | None) -> None:
            if bytes is not None:
                bytes.close()

        found = await self.disk.run(opened, undo=undo)
        if found is None:
            raise NotFound(f"the bytes of {file.id} are gone from the disk", param="file_id")
        return FileReader(self.disk, found, file.bytes)

    def page(
        self, tenant: Tenant, *, after: str | None, limit: int, order: str, purpose: str | None
    ) -> Fields:
        """A page of the files that exist for a tenant, as OpenAI's list object."""
        files = [
            file
            for file in self.known.values()
            if tenant.sees(file.owner) and (purpose is None or file.purpose == purpose)
        ]
        page = page_of(files, after=after, limit=limit, order=order)
        return page | {"data": [file.shown() for file in page["data"]]}


class FileReader:
    """Parts of a file's bytes, each read in a thread."""

    def __init__(self, disk: Disk, file: FileIO, size: int) -> None:
        self._disk = disk
        self._file = file
        self._size = size

    async def parts(self) -> AsyncIterator[bytes]:
        """The bytes in order, once; closes the file. Raises StorageUnavailable, also where the file has
        become shorter."""
        try:
            position = 0
            while position < self._size:
                size = min(MAX_READ_BYTES, self._size - position)
                part = await self._disk.run(partial(self._read, size, position))
                if not part:
                    raise StorageUnavailable("a stored file is shorter than it was")
                position += len(part)
                yield part
        finally:
            self._disk.soon(self._file.close)

    def _read(self, size: int, position: int) -> bytes:
        return os.pread(self._file.fileno(), size, position)


T = TypeVar("T")


def page_of(
    items: list[T], *, after: str | None, limit: int, order: str, id_of: Callable[[T], str] = attrgetter("id")
) -> Fields:
    """A page of `items`, which are the oldest first: those after the item with the id `after`; the newest
    first unless `order` is "asc". Raises InvalidRequest for an unknown `after` or `order`."""
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, not {order[:80]}", param="order")
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


def _read(folder: Folder, path: Path) -> StoredFile | None:
    """The metadata in a .json file of the folder; None when it or its bytes are damaged."""
    file = folder.read_record(path, StoredFile, attrgetter("id"))
    bytes_path = path.with_suffix("")
    if file is None:
        if os.path.lexists(bytes_path):
            folder.quarantine(bytes_path, "its metadata is damaged")
        return None
    try:
        found = os.lstat(bytes_path)
    except FileNotFoundError:
        folder.quarantine(path, "its bytes are missing")
        return None
    if stat.S_ISREG(found.st_mode) and found.st_size == file.bytes and os.access(bytes_path, os.R_OK):
        return file
    folder.quarantine(path, "its bytes are damaged")
    folder.quarantine(bytes_path, f"it has not the {file.bytes} bytes of its metadata, or can't be read")
    return None
