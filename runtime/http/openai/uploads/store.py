"""Uploads: files that come in parts, and become files when they are complete.

    pending ─► completed     the parts, in the client's order, are a file; they are deleted
       ├─────► cancelled     by the client; the parts are deleted
       └─────► expired       an hour after its creation; the parts are deleted

What is pending is on the disk: a record, and a file for each part. What has ended is forgotten. Parts take
their bytes from the quota of files; while an upload becomes a file, that takes its own as well.
"""

import hashlib
import os
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated as A
from typing import Literal

import anyio
import msgspec
from msgspec import Meta, Struct, structs
from starlette.datastructures import Headers
from starlette.types import Receive

from runtime import log
from runtime.errors import InvalidRequest, NotFound, Overloaded, StorageUnavailable
from runtime.http.openai.files import MAX_FILE_BYTES, File, Files, new_id
from runtime.http.openai.stored.folder import is_regular, open_private, write_atomically
from runtime.http.openai.stored.quota import Reservation
from runtime.http.openai.stored.upload import FORM_BYTES, Form, Upload, checked_purpose, declared, write_form
from runtime.json_value import JsonValue
from runtime.messages.tenants import Tenant

MAX_PART_BYTES = 64 * 2**20  # OpenAI's own limit
MAX_PARTS = 1000  # of one upload
MAX_PENDING = 1024  # uploads
LIFE_S = 3600  # of an upload, as OpenAI's
SWEEP_S = 30.0  # between two looks for uploads that have expired
COPY_BYTES = 2**22  # of a part, at once

PartId = A[str, Meta(pattern=r"^part_[0-9A-Za-z]+$")]  # is also the name of a file on disk


class UploadBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/uploads."""

    bytes: A[int, Meta(ge=0, le=MAX_FILE_BYTES)]
    filename: A[str, Meta(min_length=1, max_length=1024)]
    mime_type: A[str, Meta(max_length=256)]
    purpose: str
    expires_after: JsonValue = None  # files stay until they are deleted


class CompleteBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/uploads/{id}/complete."""

    part_ids: A[list[str], Meta(max_length=MAX_PARTS)]
    md5: A[str, Meta(max_length=64)] | None = None


class UploadObject(Struct, frozen=True, kw_only=True):
    """OpenAI's upload object."""

    id: A[str, Meta(pattern=r"^upload_[0-9A-Za-z]+$")]
    object: str = "upload"
    bytes: A[int, Meta(ge=0)]
    created_at: int  # unix seconds
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: File | None = None


class UploadPart(Struct, frozen=True, kw_only=True):
    """OpenAI's object for a part."""

    id: str
    object: str = "upload.part"
    created_at: int
    upload_id: str


class Record(Struct, frozen=True, kw_only=True):
    """A pending upload on disk."""

    upload: UploadObject
    parts: dict[PartId, A[int, Meta(ge=0)]]  # bytes of each
    owner: str = ""  # as in StoredFile.owner


class Uploads:
    """The pending uploads of one folder. `run` ends those that have expired."""

    def __init__(self, files: Files) -> None:
        """Blocking."""
        self.files = files
        self.folder = files.folder / "uploads"
        self.known: dict[str, Record] = {}
        self._locks: dict[str, anyio.Lock] = {}  # of each upload, held while it changes
        paths = sorted(self.folder.glob("*.json"))
        for path in paths:
            record = files.disk.folder.read_record(path, Record, lambda record: record.upload.id)
            if record is not None and self._is_whole(record):
                self.known[record.upload.id] = record
                files.quota.add(sum(record.parts.values()), record.owner)
        wanted = {name for record in self.known.values() for name in record.parts}
        for path in [*self.folder.glob("part_*"), *self.folder.glob("*.part")]:
            if path.name in wanted:
                continue
            if path.suffix == ".part" or len(self.known) == len(paths) and is_regular(path):
                path.unlink(missing_ok=True)
            else:
                files.disk.folder.quarantine(path, "a part of no upload, or no file")

    def find(self, upload_id: str, tenant: Tenant) -> Record:
        """The record of a pending upload. Raises NotFound, also for one of another tenant."""
        record = self.known.get(upload_id)
        if record is None or not tenant.sees(record.owner) or record.upload.expires_at <= time.time():
            raise NotFound(
                f"there is no upload {upload_id[:80]} that is pending (any more)", param="upload_id"
            )
        return record

    async def create(self, body: UploadBody, tenant: Tenant) -> UploadObject:
        """A new upload. Raises InvalidRequest, Overloaded, StorageFull, StorageUnavailable."""
        owners = Counter(record.owner for record in self.known.values())
        if owners.total() >= MAX_PENDING or owners[tenant.name] >= tenant.most(MAX_PENDING):
            raise Overloaded(
                f"as many uploads are pending as may be, {owners[tenant.name]} of them yours; complete or "
                "cancel some"
            )
        self.files.check_number(tenant)
        now = int(time.time())
        upload = UploadObject(
            id=new_id("upload"),
            bytes=body.bytes,
            created_at=now,
            expires_at=now + LIFE_S,
            filename=body.filename,
            purpose=checked_purpose(body.purpose),
            status="pending",
        )
        record = Record(upload=upload, parts={}, owner=tenant.name)
        await self.files.disk.run(lambda: self._write(record), undo=lambda _: self._erase(record))
        self.known[upload.id] = record
        return upload

    async def add_part(
        self, upload_id: str, headers: Headers, receive: Receive, tenant: Tenant
    ) -> UploadPart:
        """Receives a part, a form with the file `data`. Raises NotFound and what `write_form` raises."""
        record = self.find(upload_id, tenant)
        self._check_parts(record, 0)
        form = Form(
            headers.get("content-type", ""), "data", MAX_PART_BYTES, "send multipart/form-data with data"
        )
        part_id = new_id("part")
        with Reservation(self.files.quota, record.owner) as reservation:
            reservation.cover(min(MAX_PART_BYTES, max(0, declared(headers) - FORM_BYTES)))
            bytes_of_part = Upload(self.files.disk, self.folder / part_id)
            try:
                await write_form(form, receive, bytes_of_part, reservation)
                reservation.settle(form.size)
                self.find(upload_id, tenant)
                async with self._lock(upload_id):
                    record = self.find(upload_id, tenant)  # as it is now
                    self._check_parts(record, form.size)
                    await self._replace(
                        record, structs.replace(record, parts=record.parts | {part_id: form.size})
                    )
            except BaseException:
                bytes_of_part.discard()
                raise
            reservation.keep(form.size)
        return UploadPart(id=part_id, created_at=int(time.time()), upload_id=upload_id)

    async def complete(self, upload_id: str, body: CompleteBody, tenant: Tenant) -> UploadObject:
        """Makes a file of the parts. Raises NotFound, InvalidRequest, StorageFull, StorageUnavailable; the
        upload is pending then."""
        self.find(upload_id, tenant)
        async with self._lock(upload_id):
            record = self.find(upload_id, tenant)
            size = _size_of(record, body.part_ids)
            self.files.check_number(tenant)
            file_id = new_id("file")
            with Reservation(self.files.quota, record.owner) as reservation:
                reservation.cover(size)
                upload = Upload(self.files.disk, self.files.path(file_id))
                try:
                    await self._join(record, body, upload)
                    file = self.files.draft(
                        file_id, size, record.upload.filename, record.upload.purpose, record.owner
                    )
                    await self.files.disk.run(
                        lambda: self.files.write(file), undo=lambda _: self.files.erase(file)
                    )
                except BaseException:
                    upload.discard()
                    raise
                self.files.add(file)
                reservation.keep(size)
            self._forget(record)
        return structs.replace(record.upload, status="completed", file=file.shown())

    async def cancel(self, upload_id: str, tenant: Tenant) -> UploadObject:
        """Ends an upload. Raises NotFound."""
        self.find(upload_id, tenant)
        async with self._lock(upload_id):
            record = self.find(upload_id, tenant)
            self._forget(record)
        return structs.replace(record.upload, status="cancelled")

    async def run(self) -> None:
        """Ends uploads that have expired, until cancelled."""
        while True:
            for record in [*self.known.values()]:
                is_busy = self._lock(record.upload.id).locked()  # what is being completed may end
                if record.upload.expires_at <= time.time() and not is_busy:
                    log.get("uploads").info("expired", upload=record.upload.id, parts=len(record.parts))
                    self._forget(record)
            await anyio.sleep(SWEEP_S)

    def _lock(self, upload_id: str) -> anyio.Lock:
        """The lock of an upload that is known."""
        return self._locks.setdefault(upload_id, anyio.Lock())

    def _is_whole(self, record: Record) -> bool:
        """Whether all parts are there; what is damaged goes to quarantine."""
        for name, size in record.parts.items():
            path = self.folder / name
            if not is_regular(path) or path.stat().st_size != size:
                self.files.disk.folder.quarantine(
                    self.folder / f"{record.upload.id}.json", f"its part {name} is damaged"
                )
                return False
        return True

    def _check_parts(self, record: Record, size: int) -> None:
        """Raises InvalidRequest where an upload takes no further part of this size."""
        if len(record.parts) >= MAX_PARTS:
            raise InvalidRequest(f"the upload has {MAX_PARTS} parts already; send larger ones", param="data")
        if sum(record.parts.values()) + size > MAX_FILE_BYTES:
            raise InvalidRequest(
                f"the parts have more than {MAX_FILE_BYTES} bytes, the most that a file may have",
                param="data",
            )

    async def _join(self, record: Record, body: CompleteBody, upload: Upload) -> None:
        """Writes the parts in their order. Raises InvalidRequest for another checksum than the client's."""
        md5 = hashlib.md5(usedforsecurity=False)

        def read(name: str, position: int) -> bytearray:
            data = _read(self.folder / name, position)
            md5.update(data)
            return data

        for name in body.part_ids:
            for position in range(0, record.parts[name], COPY_BYTES):
                data = await self.files.disk.run(partial(read, name, position))
                await upload.write(data)
        if not record.upload.bytes:
            await upload.write(bytearray())
        await upload.finish()
        if body.md5 is not None and body.md5.lower() != md5.hexdigest():
            raise InvalidRequest(
                f"the parts in this order have the md5 {md5.hexdigest()}; check their order, or send them "
                "again",
                param="md5",
            )

    async def _replace(self, old: Record, new: Record) -> None:
        """Gives an upload another record, on the disk first."""
        await self.files.disk.run(lambda: self._write(new), undo=lambda _: self._write(old))
        self.known[new.upload.id] = new

    def _forget(self, record: Record) -> None:
        """An upload exists no longer. What of it can't be deleted now is deleted when it has expired, at a
        start of the server."""
        del self.known[record.upload.id]
        self._locks.pop(record.upload.id, None)
        self.files.quota.give(sum(record.parts.values()), record.owner)
        self.files.disk.soon(lambda: self._erase(record))

    def _write(self, record: Record) -> None:
        write_atomically(self.folder / f"{record.upload.id}.json", msgspec.json.encode(record))

    def _erase(self, record: Record) -> None:
        for name in (f"{record.upload.id}.json", *record.parts):
            (self.folder / name).unlink(missing_ok=True)


def _size_of(record: Record, part_ids: list[str]) -> int:
    """Bytes of the parts together. Raises InvalidRequest unless they are what the upload was made for."""
    for i, name in enumerate(part_ids):
        if name not in record.parts:
            raise InvalidRequest(f"part_ids[{i}] is no part of this upload", param=f"part_ids[{i}]")
    if len(set(part_ids)) < len(part_ids):
        raise InvalidRequest("part_ids has a part twice", param="part_ids")
    size = sum(record.parts[name] for name in part_ids)
    if size != record.upload.bytes:
        raise InvalidRequest(
            f"these parts have {size} bytes together, and the upload was created for {record.upload.bytes}; "
            "send what is missing, or cancel it",
            param="part_ids",
        )
    return size


def _read(path: Path, position: int) -> bytearray:
    """A stretch of a part. Raises OSError, StorageUnavailable for a part that has become shorter."""
    file = open_private(path, os.O_RDONLY)
    try:
        data = bytearray(os.pread(file, COPY_BYTES, position))
    finally:
        os.close(file)
    if not data:
        raise StorageUnavailable("a part of the upload is shorter than it was; cancel the upload")
    return data
