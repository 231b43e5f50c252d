"""Forms with a file, as POST /v1/files has them, written to its place in the folder while they come.

Bytes are taken from the quota before they are written: what content-length promises first, and then as the
form shows them. An upload that ends early, is refused or falls silent leaves nothing behind.
"""

import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive

from runtime.errors import InvalidRequest, RequestError, TooLarge
from runtime.http.body import body_parts, respond_early
from runtime.http.errors import error_response, path_of
from runtime.http.openai.files import MAX_FILE_BYTES, PURPOSES, Files, StoredFile, new_id
from runtime.http.openai.stored.disk import Disk
from runtime.http.openai.stored.folder import open_private, write_all
from runtime.http.openai.stored.quota import Reservation
from runtime.http.operation import json_response
from runtime.messages.tenants import Tenant

FORM_BYTES = 1 << 16  # of a form in addition to the file itself
WRITE_BYTES = 1 << 20  # are collected and then written at once
MIN_RATE = 1024.0  # bytes a second, of an upload that takes longer than a pause may


async def receive_file(headers: Headers, receive: Receive, files: Files, tenant: Tenant) -> StoredFile:
    """The file of an upload of `tenant`. Raises InvalidRequest, TooLarge, StorageFull, StorageUnavailable,
    HTTPException 408, ClientDisconnect."""
    form = Form(headers.get("content-type", ""))
    if (promised := declared(headers)) > MAX_FILE_BYTES + FORM_BYTES:
        raise TooLarge(f"the file is over {MAX_FILE_BYTES} bytes, the most that this server takes")
    files.check_number(tenant)
    file_id = new_id("file")
    with Reservation(files.quota, tenant.name) as reservation:
        reservation.cover(max(0, promised - FORM_BYTES))
        upload = Upload(files.disk, files.path(file_id))
        try:
            await write_form(form, receive, upload, reservation)
            filename, purpose = form.filename(), form.purpose()
            file = files.draft(file_id, form.size, filename, purpose, tenant.name)
            await files.disk.run(lambda: files.write(file), undo=lambda _: files.erase(file))
        except BaseException:
            upload.discard()
            raise
        files.add(file)
        reservation.keep(file.bytes)
    return file


async def store_bytes(data: bytearray, filename: str, purpose: str, files: Files, owner: str) -> StoredFile:
    """A new file with this content. Raises StorageFull, StorageUnavailable; nothing is left of it then."""
    file_id = new_id("file")
    with Reservation(files.quota, owner) as reservation:
        reservation.cover(len(data))
        upload = Upload(files.disk, files.path(file_id))
        try:
            await upload.write(data)
            await upload.finish()
            file = files.draft(file_id, len(data), filename, purpose, owner)
            await files.disk.run(lambda: files.write(file), undo=lambda _: files.erase(file))
        except BaseException:
            upload.discard()
            raise
        files.add(file)
        reservation.keep(file.bytes)
    return file


async def answer_upload(request: Request, take: Callable[[Receive], Awaitable[object]]) -> ASGIApp:
    """The answer to a request whose body `take` receives: what that returns, or its RequestError. The body of
    one that is refused before its end is read no further than it takes to answer."""
    has_come = False  # the whole body

    async def receive() -> Message:
        nonlocal has_come
        message = await request.receive()
        has_come = not message.get("more_body", False)
        return message

    try:
        return json_response(await take(receive))
    except RequestError as error:
        refusal = error_response(error, path_of(request))
        return refusal if has_come else respond_early(refusal)


async def write_form(form: "Form", receive: Receive, upload: "Upload", reservation: Reservation) -> None:
    """Writes the file of a form, whose bytes are taken from the quota as they come. Raises InvalidRequest,
    TooLarge, StorageFull, StorageUnavailable, HTTPException 408, ClientDisconnect."""
    async for part in body_parts(receive, MIN_RATE):
        form.feed(part)
        reservation.cover(form.size)
        if len(form.unwritten) >= WRITE_BYTES:
            await upload.write(form.take())
    form.check_end()
    await upload.write(form.take())
    await upload.finish()


def declared(headers: Headers) -> int:
    """The content-length; 0 for a body without one."""
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


def checked_purpose(text: str) -> str:
    """A purpose of files. Raises InvalidRequest."""
    if text not in PURPOSES:
        raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
    return text


class Form:
    """A form with a file, and maybe a field `purpose`, as its bytes come. Others are ignored."""

    def __init__(
        self,
        content_type: str,
        field: str = "file",
        max_bytes: int = MAX_FILE_BYTES,
        what: str = "send multipart/form-data with file and purpose",
    ) -> None:
        """`field` has the file, of `max_bytes` at most. `what`: the remedy for what is no such form. Raises
        InvalidRequest for anything but a form with a boundary."""
        self._field = field
        self._max_bytes = max_bytes
        self._what = what
        kind, parameters = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not parameters.get(b"boundary"):
            raise InvalidRequest(f"the body is no form; {self._what}", param=self._field)
        self.size = 0  # bytes of the file so far
        self.unwritten = bytearray()  # of them, those that `take` has not returned
        self._overhead = 0  # all other bytes
        self._fields: dict[str, bytearray] = {}
        self._filename: str | None = None
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""  # of the header that is being read
        self._target: bytearray | None = None  # where the data of the present part goes; None: nowhere
        self._has_ended = False
        try:
            self._parser = MultipartParser(
                parameters[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._take_name,
                    "on_header_value": self._take_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequest(f"the form can't be read: {error}", param=self._field) from None

    def feed(self, data: bytes) -> None:
        """Takes a part of the body. Raises InvalidRequest for what is no form, TooLarge."""
        before = self.size
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the form can't be read: {error}", param=self._field) from None
        self._overhead += len(data) - (self.size - before)
        if self._overhead > FORM_BYTES:
            raise TooLarge(
                f"the form has over {FORM_BYTES} bytes besides the file; {self._what}", param=self._field
            )
        if self.size > self._max_bytes:
            raise TooLarge(
                f"{self._field} is over {self._max_bytes} bytes, the most that this server takes",
                param=self._field,
            )

    def take(self) -> bytearray:
        """The bytes of the file that have come since the last call."""
        taken, self.unwritten = self.unwritten, bytearray()
        if self._target is taken:
            self._target = self.unwritten
        return taken

    def check_end(self) -> None:
        """Raises InvalidRequest when the body has ended, and the form or its file has not."""
        if not self._has_ended:
            raise InvalidRequest(f"the form has no end; {self._what}", param=self._field)
        if self._filename is None:
            raise InvalidRequest(f"{self._field} is missing: {self._what}", param=self._field)

    def filename(self) -> str:
        """The name of the file, in a form that has ended."""
        return self._filename or self._field

    def purpose(self) -> str:
        """The purpose, in a form that has ended. Raises InvalidRequest."""
        if (purpose := self._fields.get("purpose")) is None:
            raise InvalidRequest(f"purpose is missing: {self._what}", param="purpose")
        return checked_purpose(purpose.decode("utf-8", "replace"))

    def _begin_part(self) -> None:
        self._headers, self._target = {}, None

    def _take_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == self._field and b"filename" in options:
            if self._filename is not None:
                raise InvalidRequest("the form has several files; send one at a time", param=self._field)
            self._filename = options[b"filename"].decode("utf-8", "replace")
            self._target = self.unwritten
        elif name == "purpose":
            self._target = self._fields[name] = bytearray()

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._target is not None:
            self._target += data[start:end]
        if self._target is self.unwritten:
            self.size += end - start

    def _end(self) -> None:
        self._has_ended = True


class Upload:
    """The bytes of a file that is being written. Exists on disk from the first byte on."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._size = 0
        self._lock = threading.Lock()  # held while a thread writes or deletes
        self._is_discarded = False

    async def write(self, data: bytearray) -> None:
        """Appends data. Raises StorageFull, StorageUnavailable."""
        position, self._size = self._size, self._size + len(data)
        await self._disk.run(lambda: self._write(position, data))

    async def finish(self) -> None:
        """Waits until the bytes are on the disk. Raises StorageFull, StorageUnavailable."""
        await self._disk.run(self._sync)

    def discard(self) -> None:
        """Has what was written deleted soon; where that fails, the next start of the server does it."""
        self._disk.soon(self._unlink)

    def _write(self, position: int, data: bytearray) -> None:
        with self._lock:
            if self._is_discarded:  # this write hung meanwhile
                return
            file = open_private(self._path, os.O_WRONLY | os.O_CREAT)
            try:
                os.lseek(file, position, os.SEEK_SET)
                write_all(file, data)
            finally:
                os.close(file)

    def _unlink(self) -> None:
        with self._lock:
            self._is_discarded = True
            self._path.unlink(missing_ok=True)

    def _sync(self) -> None:
        file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
