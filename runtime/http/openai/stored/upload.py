"""POST /v1/files: a form with a file, written to its place in the folder while it comes.

Bytes are taken from the quota before they are written: what content-length promises first, and then as the
form shows them. An upload that ends early, is refused or falls silent leaves nothing behind.
"""

import os
import threading
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.types import Receive

from runtime.errors import InvalidRequest, TooLarge
from runtime.http.body import body_parts
from runtime.http.openai.files import MAX_FILE_BYTES, PURPOSES, Files, StoredFile, new_id
from runtime.http.openai.stored.disk import Disk
from runtime.http.openai.stored.folder import open_private, write_all
from runtime.http.openai.stored.quota import Reservation
from runtime.messages.tenants import Tenant

FORM_BYTES = 1 << 16  # of a form in addition to the file itself
WRITE_BYTES = 1 << 20  # are collected and then written at once
MIN_RATE = 1024.0  # bytes a second, of an upload that takes longer than a pause may
WHAT = "send multipart/form-data with file and purpose"


async def receive_file(headers: Headers, receive: Receive, files: Files, tenant: Tenant) -> StoredFile:
    """The file of an upload of `tenant`. Raises InvalidRequest, TooLarge, StorageFull, StorageUnavailable,
    HTTPException 408, ClientDisconnect."""
    form = Form(headers.get("content-type", ""))
    if (declared := _declared(headers)) > MAX_FILE_BYTES + FORM_BYTES:
        raise TooLarge(f"the file is over {MAX_FILE_BYTES} bytes, the most that this server takes")
    files.check_number(tenant)
    file_id = new_id("file")
    with Reservation(files.quota, tenant.name) as reservation:
        reservation.cover(max(0, declared - FORM_BYTES))
        upload = Upload(files.disk, files.path(file_id))
        try:
            async for part in body_parts(receive, MIN_RATE):
                form.feed(part)
                reservation.cover(form.size)
                if len(form.unwritten) >= WRITE_BYTES:
                    await upload.write(form.take())
            filename, purpose = form.end()
            await upload.write(form.take())
            await upload.finish()
            file = files.draft(file_id, form.size, filename, purpose, tenant.name)
            await files.disk.run(lambda: files.write(file), undo=lambda _: files.erase(file))
        except BaseException:
            upload.discard()
            raise
        files.add(file)
        reservation.keep(file.bytes)
    return file


def _declared(headers: Headers) -> int:
    """The content-length; 0 for a body without one."""
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


class Form:
    """A form with the fields `file` and `purpose`, as its bytes come. Others are ignored."""

    def __init__(self, content_type: str) -> None:
        """Raises InvalidRequest for anything but a form with a boundary."""
        kind, parameters = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not parameters.get(b"boundary"):
            raise InvalidRequest(f"the body is no form; {WHAT}", param="file")
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
            raise InvalidRequest(f"the form can't be read: {error}", param="file") from None

    def feed(self, data: bytes) -> None:
        """Takes a part of the body. Raises InvalidRequest for what is no form, TooLarge."""
        before = self.size
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the form can't be read: {error}", param="file") from None
        self._overhead += len(data) - (self.size - before)
        if self._overhead > FORM_BYTES:
            raise TooLarge(f"the form has over {FORM_BYTES} bytes besides the file; {WHAT}", param="file")
        if self.size > MAX_FILE_BYTES:
            raise TooLarge(f"the file is over {MAX_FILE_BYTES} bytes, the most that this server takes")

    def take(self) -> bytearray:
        """The bytes of the file that have come since the last call."""
        taken, self.unwritten = self.unwritten, bytearray()
        if self._target is taken:
            self._target = self.unwritten
        return taken

    def end(self) -> tuple[str, str]:
        """The filename and the purpose, at the end of the body. Raises InvalidRequest."""
        if not self._has_ended:
            raise InvalidRequest(f"the form has no end; {WHAT}", param="file")
        if self._filename is None:
            raise InvalidRequest(f"file is missing: {WHAT}", param="file")
        if (purpose := self._fields.get("purpose")) is None:
            raise InvalidRequest(f"purpose is missing: {WHAT}", param="purpose")
        text = purpose.decode("utf-8", "replace")
        if text not in PURPOSES:
            raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
        return self._filename or "file", text

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
        if name == "file" and b"filename" in options:
            if self._filename is not None:
                raise InvalidRequest("the form has several files; send one at a time", param="file")
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
