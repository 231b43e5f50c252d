"""Runs batches in idle time: requests of clients go first.

There is one task a batch. All batches share MAX_OPEN slots for running lines, which they get in turn; those
of one of several tenants have --tenant-quota of them at most. A line runs as the tenant whose batch it is. A
batch whose files can't be written, because the disk or the quota is full, or the disk is read-only or gone,
waits: it keeps its slots and the answers that it has, tries again every RETRY_S, and goes on when there is
room.
"""

import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import TypeVar

import anyio
import msgspec
from msgspec import Struct, structs

from runtime import log
from runtime.errors import (
    InternalFault,
    InvalidRequest,
    Overloaded,
    RequestError,
    StorageFull,
    StorageUnavailable,
    Unavailable,
)
from runtime.http.errors import error_body
from runtime.http.openai.batch_lines import BrokenInput, Line, LineError, num_cut_off
from runtime.http.openai.batches import ENDED, Append, Batches, Counts, Record, Status, advance
from runtime.http.openai.files import new_id
from runtime.http.openai.stored.quota import Reservation
from runtime.http.openai.stored.tasks import StoredTask, StoredTasks
from runtime.http.tenant_service import service_for
from runtime.messages.tenants import tenant_of
from runtime.service import Service

MAX_OPEN = 64  # running lines
PAUSE_S = 1.0  # before an overloaded server is tried again
RETRY_S = 5.0  # before the disk is tried again
CUT_OFF = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
    "expired": ("batch_expired", "the batch expired before this line was answered"),
}
FAULT = LineError(code="server_error", message="something went wrong in the server; its log has the details")
T = TypeVar("T")


class StreamField(Struct):
    """The `stream` field of a body, which a batch cannot serve."""

    stream: bool | None = None


class Slots:
    """Slots for running lines, in the order in which they are asked for; one tenant has its part of them."""

    def __init__(self, count: int, tenant_quota: float) -> None:
        """`tenant_quota`: as in Tenant.quota."""
        self._count = count
        self._tenant_quota = tenant_quota
        self._all = anyio.CapacityLimiter(count)
        self._own: dict[str, anyio.CapacityLimiter] = {}

    async def acquire(self, owner: str) -> object:
        """Waits for a slot. Returns what `release` takes."""
        if owner not in self._own:
            most = tenant_of(owner, self._tenant_quota).most(self._count)
            self._own[owner] = anyio.CapacityLimiter(most)
        own, slot = self._own[owner], object()
        await own.acquire_on_behalf_of(slot)
        try:
            await self._all.acquire_on_behalf_of(slot)
        except BaseException:
            own.release_on_behalf_of(slot)
            raise
        return slot

    def release(self, owner: str, slot: object) -> None:
        """Gives a slot back."""
        self._all.release_on_behalf_of(slot)
        self._own[owner].release_on_behalf_of(slot)


class Outputs:
    """The output files of one running batch: what is appended is taken from the quota first. While the disk
    or the quota is full, or the disk fails, calls are made again until they succeed; each must be right to
    repeat."""

    def __init__(self, batches: Batches, record: Record) -> None:
        self._batches = batches
        self._record = record
        self._reservation = Reservation(batches.files.quota, record.owner)
        self._writing = anyio.Lock()
        self._is_waiting = False

    async def run(self, call: Callable[[], T], size: int = 0) -> T:
        """The result of `call`, which adds `size` bytes. Raises what else `call` raises."""
        batch_id = self._record.batch.id
        while True:
            try:
                self._reservation.cover(self._reservation.size + size)
                size = 0
                result = await self._batches.files.disk.run(call)
            except (StorageFull, StorageUnavailable) as error:
                if not self._is_waiting:
                    log.get("batches").error("waits for the disk", batch=batch_id, reason=error.message)
                self._is_waiting = True
                await anyio.sleep(RETRY_S)
                continue
            if self._is_waiting:
                log.get("batches").info("goes on: the disk works again", batch=batch_id)
            self._is_waiting = False
            return result

    async def append(self, output: Mapping[str, object], *, is_error: bool) -> None:
        """Appends one answer, and counts it."""
        record, data = self._record, msgspec.json.encode(output) + b"\n"
        append = Append(self._batches, record, record.error_id if is_error else record.output_id, data)
        async with self._writing:
            await self.run(append, len(data))
        old = record.batch.request_counts
        count(record, Counts(old.total, old.completed + (not is_error), old.failed + is_error))

    async def recover(self, *, seals: bool = False) -> dict[str, int]:
        """Repairs the files and counts their lines; `seals`: nothing is appended any more. Returns the bytes
        of those that have lines."""
        batches, record = self._batches, self._record
        count(record, await self.run(lambda: batches.recover(record, seals=seals)))
        sizes = await self.run(lambda: batches.sizes(record))
        self._reservation.settle(sum(sizes.values()))
        return sizes

    async def publish(self) -> dict[str, str]:
        """Makes files of those that have lines. Returns their ids, as fields of the batch."""
        files, record, fields = self._batches.files, self._record, {}
        for file_id, size in (await self.recover(seals=True)).items():
            kind = "output" if file_id == record.output_id else "error"
            fields[f"{kind}_file_id"] = file_id
            if file_id in files.known:  # a server that was killed has done so
                self._reservation.settle(self._reservation.size - size)
            else:
                name = f"{record.batch.id}_{kind}.jsonl"
                file = files.draft(file_id, size, name, "batch", record.owner)
                await self.run(partial(files.write, file))
                files.add(file)
                self._reservation.keep(size)
        return fields


class BatchRunner:
    """Runs the batches of `batches` in `tasks`."""

    def __init__(
        self, service: Service, batches: Batches, tasks: StoredTasks, max_open: int = MAX_OPEN
    ) -> None:
        self.service = service
        self.batches = batches
        self._tasks = tasks
        self._slots = Slots(max_open, batches.files.quota.tenant_quota)
        self._scopes: dict[str, anyio.CancelScope] = {}  # by batch id, of running batches
        for record in batches.known.values():  # those that a killed server left unfinished
            if record.batch.status not in ENDED:
                self.add(record)

    def add(self, record: Record) -> None:
        """Starts a batch."""
        outputs = Outputs(self.batches, record)
        work, fail = partial(self._run, record, outputs), partial(self._fail, record, outputs, [FAULT])
        self._tasks.start(StoredTask("batch", record.batch.id, work, fail))

    async def cancel(self, record: Record) -> None:
        """Cancels a batch. Raises InvalidRequest for one that has ended."""
        if record.batch.status in ENDED:
            raise InvalidRequest(f"the batch is {record.batch.status} already", param="batch_id")
        advance(record, "cancelling")
        if (scope := self._scopes.get(record.batch.id)) is not None:
            scope.cancel()
        try:
            await self.batches.files.disk.run(lambda: self.batches.save(record))
        except (StorageFull, StorageUnavailable):
            # the task of the batch writes its end as soon as it can
            log.get("batches").warning("is cancelled, but not on the disk", batch=record.batch.id)

    async def _run(self, record: Record, outputs: Outputs) -> None:
        """Runs one batch to its end."""
        try:
            await self._process(record, outputs)
        except BrokenInput as error:
            log.get("batches").error("failed for want of its input", batch=record.batch.id, reason=str(error))
            await self._fail(record, outputs, [LineError(code="storage_error", message=str(error))])

    async def _process(self, record: Record, outputs: Outputs) -> None:
        batches = self.batches
        if record.batch.status == "validating":
            total, errors = await outputs.run(lambda: batches.check(record))
            count(record, Counts(total))
            if errors:
                return await self._fail(record, outputs, errors)
            if record.batch.status == "validating":  # not cancelled meanwhile
                advance(record, "in_progress")
            await outputs.run(lambda: batches.save(record))
        await outputs.recover()
        end: Status = "completed"
        if record.batch.status == "in_progress":
            with anyio.move_on_after(record.batch.expires_at - time.time()) as limit:
                self._scopes[record.batch.id] = limit
                while await self._answer_lines(record, outputs):
                    pass  # until every line has an answer on the disk
            del self._scopes[record.batch.id]
            if limit.cancelled_caught and record.batch.status == "in_progress":
                end = "expired"
        if record.batch.status == "cancelling":
            end = "cancelled"
        if end in CUT_OFF:
            await outputs.run(lambda: batches.cut_off(record, *CUT_OFF[end]))
        else:
            advance(record, "finalizing")
            await outputs.run(lambda: batches.save(record))
        await self._end(record, outputs, end)

    async def _fail(self, record: Record, outputs: Outputs, errors: list[LineError]) -> None:
        self._scopes.pop(record.batch.id, None)
        data = [msgspec.to_builtins(error) for error in errors]
        await self._end(record, outputs, "failed", errors={"object": "list", "data": data})

    async def _end(self, record: Record, outputs: Outputs, status: Status, **fields: object) -> None:
        """Publishes the answers that there are, and ends the batch."""
        fields |= await outputs.publish()
        if status in CUT_OFF:
            errors = self.batches.files.path(record.error_id)
            record.num_cut_off = await outputs.run(lambda: num_cut_off(errors))
        advance(record, status, **fields)
        await outputs.run(lambda: self.batches.save(record))
        log.get("batches").info(status, batch=record.batch.id, **structs.asdict(record.batch.request_counts))

    async def _answer_lines(self, record: Record, outputs: Outputs) -> bool:
        """Answers the lines that have no answer. Returns whether there were any. Raises BrokenInput."""
        lines: Generator[Line] = self.batches.unanswered(record)
        is_busy, broken = False, None
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    line = await self.batches.files.disk.run(lambda: next(lines, None))
                except BrokenInput as error:
                    broken = error
                    break
                except (StorageFull, StorageUnavailable):
                    is_busy = True  # the rest is read in another round
                    await anyio.sleep(RETRY_S)
                    break
                if line is None:
                    break
                is_busy = True
                slot = await self._slots.acquire(record.owner)
                tasks.start_soon(self._answer, outputs, line, record.owner, slot)
        if broken is not None:
            raise broken
        return is_busy

    async def _answer(self, outputs: Outputs, line: Line, owner: str, slot: object) -> None:
        try:
            status, body = await self._serve(line, owner)
            response = {"status_code": status, "request_id": new_id("req"), "body": body}
            output = {
                "id": new_id("batch_req"),
                "custom_id": line.custom_id,
                "response": response,
                "error": None,
            }
            await outputs.append(output, is_error=status != 200)
        finally:
            self._slots.release(owner, slot)

    async def _serve(self, line: Line, owner: str) -> tuple[int, object]:
        """Status and body of the HTTP response to this line. Retries while the server is overloaded."""
        service = service_for(self.service, tenant_of(owner, self.batches.files.quota.tenant_quota))
        while True:
            try:
                _refuse_stream(bytes(line.body))
                answer = self.batches.endpoints[line.url](service, bytes(line.body))
                answer.exchange.requests = [
                    structs.replace(request, is_idle=True) for request in answer.exchange.requests
                ]
                return 200, await answer.complete()
            except (Overloaded, Unavailable):
                await anyio.sleep(PAUSE_S)
            except RequestError as error:
                return error.status, error_body(error, line.url)
            except Exception:
                log.get("batches").exception(
                    "a line of a batch could not be served", custom_id=line.custom_id, exc_info=True
                )
                fault = InternalFault("something went wrong in the server; its log has the details")
                return fault.status, error_body(fault, line.url)


def count(record: Record, counts: Counts) -> None:
    """Sets the counts of lines."""
    record.batch = structs.replace(record.batch, request_counts=counts)


def _refuse_stream(body: bytes) -> None:
    try:
        is_stream = msgspec.json.decode(body, type=StreamField).stream
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the route refuses the body
    if is_stream:
        raise InvalidRequest("a batch can't stream; leave stream out", param="stream")
