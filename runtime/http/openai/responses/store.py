"""Stored responses, which clients fetch again and continue: bounded, the oldest are dropped first.

    put ─► memory ─► task of the store ─► ResponseTable          with --file-storage-path
    find ◄── memory ◄──────────────────── ResponseTable

Without a folder, responses are in memory only. With one, a response is written right after it was put, and
until then it is served from memory. So no answer waits for the disk, and none fails with it: while the disk
takes nothing, responses stay in memory, within the same bounds, and are written when it works again.
"""

import sqlite3
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice

import anyio
import msgspec
from anyio.to_thread import run_sync

from runtime import log
from runtime.errors import InvalidRequest, NotFound, RequestError, StorageFull, StorageUnavailable
from runtime.gil import giving_way
from runtime.http.cut_body import MIN_BYTES, CutBody, cut, uncut, with_texts
from runtime.http.openai.responses.items import Item
from runtime.http.openai.responses.table import OPEN, ResponseTable, Row, StoredResponse
from runtime.http.openai.stored.disk import Disk, storage_error
from runtime.http.openai.stored.quota import Kept
from runtime.memory_file import MemoryFile
from runtime.messages.media import EncodedText
from runtime.messages.tenants import Tenant

MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 2**20
MAX_ROWS = 100  # are written at once
RETRY_S = 5.0  # before the disk is tried again
NO_TEXTS: Mapping[str, EncodedText] = {}
LAST_WRITE_S = 2.0  # to write what is in memory when the server stops


class PreviousResponseNotFound(InvalidRequest):
    """There is no stored response to continue. Clients know the code, and send the conversation whole."""

    code = "previous_response_not_found"


class ResponseStore:
    """Responses by id. `run` writes them to disk."""

    def __init__(
        self,
        disk: Disk | None,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        tenant_quota: float = 1.0,
    ) -> None:
        """`tenant_quota`: as in Tenant.quota. Blocking."""
        kept = Kept(max_responses, max_bytes, tenant_quota)
        self.table = None if disk is None else ResponseTable(disk.folder, kept.copy())
        self._disk = disk
        self._memory: OrderedDict[str, Row] = OrderedDict()  # with a table: what is not written yet
        self.kept = kept  # of what is in memory
        self._news = anyio.Event()
        self._using_table = anyio.Lock()
        self._fault: StorageFull | StorageUnavailable | None = None  # of the last write
        if self.table is not None:
            try:
                self.table.end_interrupted()
            except (sqlite3.Error, OSError) as error:
                self._note(storage_error(error))

    def close(self) -> None:
        """Closes the file. Blocking."""
        if self.table is not None:
            self.table.close()

    def check(self) -> None:
        """Raises StorageFull or StorageUnavailable while responses can't be written to disk."""
        if self._fault is not None:
            raise type(self._fault)(self._fault.message)

    def put(self, record: StoredResponse, texts: Mapping[str, EncodedText] = NO_TEXTS) -> None:
        """Stores a response, or its new state. It is on the disk soon. `texts`: what marks in it stand for
        (http/cut_body.py)."""
        row = _row(record, texts)
        if not self.kept.takes(row.owner, len(row.data)):
            return
        if (before := self._memory.get(row.id)) is not None:
            self.kept.add(before.owner, -len(before.data), -1)
        self._memory[row.id] = row
        self.kept.add(row.owner, len(row.data))
        while self.kept.is_over(row.owner):
            self._forget(next(one for one in self._memory.values() if one.owner == row.owner))
        while self.kept.is_full:
            self._forget(next(iter(self._memory.values())))
        self._news.set()

    async def create(self, record: StoredResponse, texts: Mapping[str, EncodedText] = NO_TEXTS) -> None:
        """Stores a new response, and waits until it is written. `texts`: as for `put`. Raises StorageFull,
        StorageUnavailable; nothing is left of it then."""
        if self.table is None or self._disk is None:
            return self.put(record, texts)
        table, row = self.table, _row(record, texts)
        self.check()
        async with self._using_table:
            self.check()  # others may have failed while this task waited
            try:
                await self._disk.run(lambda: table.put([row]), undo=lambda _: _revert(table, row.id))
            except (StorageFull, StorageUnavailable) as error:
                self._note(error)
                raise

    async def find(self, response_id: str, tenant: Tenant, param: str = "response_id") -> StoredResponse:
        """The stored response of an id. Raises NotFound, or PreviousResponseNotFound where `param` is
        previous_response_id, also for a response of another tenant; StorageUnavailable."""
        record = None
        if (row := self._memory.get(response_id)) is not None:
            record = msgspec.json.decode(row.data, type=StoredResponse)
        elif self.table is not None and self._disk is not None:
            table = self.table
            record = await self._disk.run(lambda: table.find(response_id))
        if record is None or not tenant.sees(record.owner):
            raise _not_found(response_id, param)
        return record

    async def find_cut(self, response_id: str, tenant: Tenant) -> CutBody:
        """The stored response that is to be continued, as JSON without the files in it. Raises
        PreviousResponseNotFound, also for a response of another tenant; StorageUnavailable, Unavailable."""
        row = self._memory.get(response_id)
        if row is None and self.table is not None and self._disk is not None:
            table = self.table
            row = await self._disk.run(lambda: table.find_row(response_id))
        if row is None or not tenant.sees(row.owner):
            raise _not_found(response_id, "previous_response_id")
        return await run_sync(giving_way, _cut, row.data) if len(row.data) >= MIN_BYTES else uncut(row.data)

    async def delete(self, response_id: str, tenant: Tenant) -> None:
        """Deletes a response. Raises NotFound, also for a response of another tenant, StorageFull,
        StorageUnavailable."""
        is_found, owner = False, None if tenant.sees_all else tenant.name
        if self.table is not None and self._disk is not None:
            table = self.table
            async with self._using_table:
                is_found = await self._disk.run(lambda: table.delete(response_id, owner))
        if (row := self._memory.get(response_id)) is not None and tenant.sees(row.owner):
            self._forget(row)
        elif not is_found:
            raise _not_found(response_id, "response_id")

    async def run(self) -> None:
        """Writes responses to disk until cancelled."""
        if self.table is None:
            return
        try:
            while True:
                if not self._memory and self._fault is None:
                    self._news = anyio.Event()
                    await self._news.wait()
                try:
                    await self._write()
                except (StorageFull, StorageUnavailable) as error:
                    self._note(error)
                    await anyio.sleep(RETRY_S)
        finally:
            with anyio.move_on_after(LAST_WRITE_S, shield=True):
                await self._write_last()

    async def _write(self) -> None:
        """Writes some of the responses in memory, the oldest first. Raises StorageFull,
        StorageUnavailable."""
        assert self.table is not None and self._disk is not None
        table = self.table
        async with self._using_table:
            rows = list(islice(self._memory.values(), MAX_ROWS))
            await self._disk.run(lambda: table.put(rows))
        for row in rows:
            if self._memory.get(row.id) is row:  # else there is a newer state
                self._forget(row)
        if self._fault is not None:
            log.get("responses").info("responses are written to disk again")
            self._fault = None

    async def _write_last(self) -> None:
        """Writes what is in memory when the server stops."""
        try:
            while self._memory:
                await self._write()
        except (StorageFull, StorageUnavailable) as error:
            log.get("responses").error(
                "responses are lost: they can't be written", count=len(self._memory), reason=error.message
            )

    def _forget(self, row: Row) -> None:
        del self._memory[row.id]
        self.kept.add(row.owner, -len(row.data), -1)

    def _note(self, error: StorageFull | StorageUnavailable) -> None:
        if self._fault is None:
            log.get("responses").error(
                "responses stay in memory: they can't be written", reason=error.message
            )
        self._fault = error
        self._news.set()  # `run` tries again


def conversation_of(data: bytes, response_id: str) -> list[Item]:
    """The items of a stored response's conversation. Raises PreviousResponseNotFound for damaged data."""
    try:
        return msgspec.json.decode(data, type=StoredResponse).conversation
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
        raise _not_found(response_id, "previous_response_id") from None


def _cut(data: bytes) -> CutBody:
    memory = MemoryFile()
    memory.append(data)
    return cut(memory)


def _row(record: StoredResponse, texts: Mapping[str, EncodedText] = NO_TEXTS) -> Row:
    data = with_texts(msgspec.json.encode(record), texts)
    return Row(record.id, record.owner, record.response["status"] not in OPEN, data)


def _revert(table: ResponseTable, response_id: str) -> None:
    with suppress(sqlite3.Error, OSError):  # the next start ends the response then
        table.delete(response_id)


def _not_found(response_id: str, param: str) -> RequestError:
    kind = PreviousResponseNotFound if param == "previous_response_id" else NotFound
    return kind(f"there is no response {response_id[:80]} (any more)", param=param)
