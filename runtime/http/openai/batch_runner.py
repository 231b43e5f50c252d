"""Runs batches in idle time: requests of clients go first.

There is one task a batch. All batches share MAX_OPEN slots for running lines, which they get in turn.
"""

import time
from collections.abc import Generator
from contextlib import closing
from functools import partial
from typing import Any

import anyio
import msgspec
from msgspec import Struct, structs

from runtime import log
from runtime.errors import InternalFault, InvalidRequest, Overloaded, RequestError, Unavailable
from runtime.http.errors import error_object
from runtime.http.openai.batches import ENDED, Batches, Line, LineError, Record
from runtime.http.openai.files import in_thread, new_id
from runtime.service import Service

MAX_OPEN = 64  # running lines
PAUSE_S = 1.0  # before an overloaded server is tried again
CUT_OFF = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was answered"),
    "expired": ("batch_expired", "the batch expired before this line was answered"),
}


class StreamField(Struct):
    """The `stream` field of a body, which a batch cannot serve."""

    stream: bool | None = None


class BatchRunner:
    """Runs the batches of `batches`, as long as `run` runs."""

    def __init__(self, service: Service, batches: Batches, max_open: int = MAX_OPEN) -> None:
        self.service = service
        self.batches = batches
        self._slots = anyio.CapacityLimiter(max_open)
        self._writer = anyio.CapacityLimiter(1)  # one write at a time
        self._scopes: dict[str, anyio.CancelScope] = {}  # by batch id, of running batches
        self._added: list[Record] = []
        self._wakeup = anyio.Event()

    async def run(self) -> None:
        """Runs batches until cancelled, first those that a killed server left unfinished."""
        self._added = [r for r in self.batches.known.values() if r.batch.status not in ENDED] + self._added
        async with anyio.create_task_group() as tasks:
            while True:
                for record in self._added:
                    tasks.start_soon(self._run, record)
                self._added, self._wakeup = [], anyio.Event()
                await self._wakeup.wait()

    def add(self, record: Record) -> None:
        """Starts a new batch."""
        self._added.append(record)
        self._wakeup.set()

    async def cancel(self, record: Record) -> None:
        """Cancels a batch. Raises InvalidRequest for one that has ended."""
        if record.batch.status in ENDED:
            raise InvalidRequest(f"the batch is {record.batch.status} already", param="batch_id")
        await in_thread(self.batches.advance, record, "cancelling")
        if (scope := self._scopes.get(record.batch.id)) is not None:
            scope.cancel()

    async def _run(self, record: Record) -> None:
        """Runs one batch to its end. Its errors do not affect other batches."""
        try:
            await self._process(record)
        except OSError as error:
            log.get("batches").error(
                "a batch failed for want of its files", batch=record.batch.id, error=str(error)
            )
            await self._fail(
                record,
                [
                    LineError(
                        code="storage_error", message="the server could not read or write the batch's files"
                    )
                ],
            )

    async def _process(self, record: Record) -> None:
        batches = self.batches
        if record.batch.status == "validating":
            if errors := await in_thread(batches.check, record):
                return await self._fail(record, errors)
            if record.batch.status == "validating":  # not cancelled meanwhile
                await in_thread(batches.advance, record, "in_progress")
        await in_thread(batches.recover, record)
        end = "completed"
        if record.batch.status == "in_progress":
            with anyio.move_on_after(record.batch.expires_at - time.time()) as limit:
                self._scopes[record.batch.id] = limit
                await self._answer_all(record)
            del self._scopes[record.batch.id]
            if limit.cancelled_caught and record.batch.status == "in_progress":
                end = "expired"
        if record.batch.status == "cancelling":
            end = "cancelled"
        if end in CUT_OFF:
            await in_thread(self._cut_off, record, *CUT_OFF[end])
        else:
            await in_thread(batches.advance, record, "finalizing")
        fields = await in_thread(batches.publish, record)
        await in_thread(batches.advance, record, end, **fields)
        log.get("batches").info(end, batch=record.batch.id, **structs.asdict(record.batch.request_counts))

    async def _fail(self, record: Record, errors: list[LineError]) -> None:
        await in_thread(
            self.batches.advance,
            record,
            "failed",
            errors={"object": "list", "data": [msgspec.to_builtins(error) for error in errors]},
        )

    async def _answer_all(self, record: Record) -> None:
        lines: Generator[Line] = self.batches.unanswered(record)
        with closing(lines):
            async with anyio.create_task_group() as tasks:
                while (line := await in_thread(next, lines, None)) is not None:
                    borrower = object()
                    await self._slots.acquire_on_behalf_of(borrower)
                    tasks.start_soon(self._answer, record, line, borrower)

    async def _answer(self, record: Record, line: Line, borrower: object) -> None:
        try:
            status, body = await self._serve(line)
        finally:
            self._slots.release_on_behalf_of(borrower)
        response = {"status_code": status, "request_id": new_id("req"), "body": body}
        output = {"id": new_id("batch_req"), "custom_id": line.custom_id, "response": response, "error": None}
        # an answer is written even when the batch is cancelled meanwhile
        with anyio.CancelScope(shield=True):
            append = partial(self.batches.append, record, output, is_error=status != 200)
            await anyio.to_thread.run_sync(append, limiter=self._writer)

    async def _serve(self, line: Line) -> tuple[int, Any]:
        """Status and body of the HTTP response to this line. Retries while the server is overloaded."""
        while True:
            try:
                _refuse_stream(bytes(line.body))
                answer = self.batches.endpoints[line.url](self.service, bytes(line.body))
                answer.exchange.requests = [
                    structs.replace(request, is_idle=True) for request in answer.exchange.requests
                ]
                return 200, await answer.complete()
            except (Overloaded, Unavailable):
                await anyio.sleep(PAUSE_S)
            except RequestError as error:
                return error.status, error_object(error)
            except Exception:
                log.get("batches").exception(
                    "a line of a batch could not be served", custom_id=line.custom_id, exc_info=True
                )
                fault = InternalFault("something went wrong in the server; its log has the details")
                return fault.status, error_object(fault)

    def _cut_off(self, record: Record, code: str, message: str) -> None:
        """Gives every unanswered line an error."""
        for line in list(self.batches.unanswered(record)):
            output = {
                "id": new_id("batch_req"),
                "custom_id": line.custom_id,
                "response": None,
                "error": {"code": code, "message": message},
            }
            self.batches.append(record, output, is_error=True)


def _refuse_stream(body: bytes) -> None:
    try:
        is_stream = msgspec.json.decode(body, type=StreamField).stream
    except msgspec.MsgspecError:
        return  # the route refuses the body
    if is_stream:
        raise InvalidRequest("a batch can't stream; leave stream out", param="stream")
