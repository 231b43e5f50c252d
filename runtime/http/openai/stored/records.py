"""Records of one kind that clients fetch again and continue, such as responses: bounded, those that changed
longest ago are dropped first.

    put ─► memory ─► task of the store ─► RecordTable            with --file-storage-path
    find ◄── memory ◄──────────────────── RecordTable

Without a folder, records are in memory only. With one, a record is written right after it was put, and until
then it is served from memory. So no answer waits for the disk, and none fails with it: while the disk takes
nothing, records stay in memory, within the same bounds, and are written when it works again.
"""

import sqlite3
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Generic

import anyio
import msgspec

from runtime import log
from runtime.errors import StorageFull, StorageUnavailable
from runtime.http.cut_body import with_texts
from runtime.http.openai.stored.disk import Disk, storage_error
from runtime.http.openai.stored.quota import Kept
from runtime.http.openai.stored.record_table import R, RecordTable, Row, Stored
from runtime.messages.media import EncodedText
from runtime.messages.tenants import Tenant

MAX_RECORDS = 10_000
MAX_BYTES = 256 * 2**20
MAX_ROWS = 100  # are written at once
RETRY_S = 5.0  # before the disk is tried again
NO_TEXTS: Mapping[str, EncodedText] = {}
LAST_WRITE_S = 2.0  # to write what is in memory when the server stops


class RecordStore(Generic[R]):
    """Records by id. `run` writes them to disk."""

    def __init__(
        self,
        kind: type[R],
        name: str,
        disk: Disk | None,
        max_count: int = MAX_RECORDS,
        max_bytes: int = MAX_BYTES,
        tenant_quota: float = 1.0,
    ) -> None:
        """`name` of the records in the log, and of their table. `tenant_quota`: as in Tenant.quota.
        Blocking."""
        kept = Kept(max_count, max_bytes, tenant_quota)
        self.name = name
        self.table = None if disk is None else RecordTable(disk.folder, name, kind, kept.copy())
        self._kind = kind
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
        """Raises StorageFull or StorageUnavailable while records can't be written to disk."""
        if self._fault is not None:
            raise type(self._fault)(self._fault.message)

    def put(self, record: R, texts: Mapping[str, EncodedText] = NO_TEXTS) -> bool:
        """Stores a record, or its new state. It is on the disk soon. `texts`: what marks in it stand for
        (http/cut_body.py). False: it is larger than may be kept, and nothing has changed."""
        row = _row(record, texts)
        if not self.kept.takes(row.owner, len(row.data)):
            return False
        if (before := self._memory.get(row.id)) is not None:
            self._forget(before)
        self._memory[row.id] = row
        self.kept.add(row.owner, len(row.data))
        while self.kept.is_over(row.owner):
            self._forget(next(one for one in self._memory.values() if one.owner == row.owner))
        while self.kept.is_full:
            self._forget(next(iter(self._memory.values())))
        self._news.set()
        return True

    async def create(self, record: R, texts: Mapping[str, EncodedText] = NO_TEXTS) -> None:
        """Stores a new record, and waits until it is written. `texts`: as for `put`. Raises StorageFull,
        StorageUnavailable; nothing is left of it then."""
        if self.table is None or self._disk is None:
            self.put(record, texts)
            return
        table, row = self.table, _row(record, texts)
        self.check()
        async with self._using_table:
            self.check()  # others may have failed while this task waited
            try:
                await self._disk.run(lambda: table.put([row]), undo=lambda _: _revert(table, row.id))
            except (StorageFull, StorageUnavailable) as error:
                self._note(error)
                raise

    async def find(self, record_id: str, tenant: Tenant) -> R | None:
        """The record of an id; None where there is none for this tenant. Raises StorageUnavailable."""
        record: R | None = None
        if (row := self._memory.get(record_id)) is not None:
            record = msgspec.json.decode(row.data, type=self._kind)
        elif self.table is not None and self._disk is not None:
            table = self.table
            record = await self._disk.run(lambda: table.find(record_id))
        return record if record is not None and tenant.sees(record.owner) else None

    async def delete(self, record_id: str, tenant: Tenant) -> bool:
        """Deletes a record of this tenant. Returns whether there was one. Raises StorageFull,
        StorageUnavailable."""
        is_found, owner = False, None if tenant.sees_all else tenant.name
        if self.table is not None and self._disk is not None:
            table = self.table
            async with self._using_table:
                is_found = await self._disk.run(lambda: table.delete(record_id, owner))
        if (row := self._memory.get(record_id)) is not None and tenant.sees(row.owner):
            self._forget(row)
            return True
        return is_found

    async def run(self) -> None:
        """Writes records to disk until cancelled."""
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
        """Writes some of the records in memory, the oldest first. Raises StorageFull,
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
            log.get(self.name).info(f"{self.name} are written to disk again")
            self._fault = None

    async def _write_last(self) -> None:
        """Writes what is in memory when the server stops."""
        try:
            while self._memory:
                await self._write()
        except (StorageFull, StorageUnavailable) as error:
            log.get(self.name).error(
                f"{self.name} are lost: they can't be written", count=len(self._memory), reason=error.message
            )

    def _forget(self, row: Row) -> None:
        del self._memory[row.id]
        self.kept.add(row.owner, -len(row.data), -1)

    def _note(self, error: StorageFull | StorageUnavailable) -> None:
        if self._fault is None:
            log.get(self.name).error(
                f"{self.name} stay in memory: they can't be written", reason=error.message
            )
        self._fault = error
        self._news.set()  # `run` tries again


def _row(record: Stored, texts: Mapping[str, EncodedText] = NO_TEXTS) -> Row:
    data = with_texts(msgspec.json.encode(record), texts)
    return Row(record.id, record.owner, record.is_over, data)


def _revert(table: RecordTable[R], record_id: str) -> None:
    with suppress(sqlite3.Error, OSError):  # the next start ends the record then
        table.delete(record_id)
