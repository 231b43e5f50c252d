"""/v1/messages/batches: Anthropic's batches. Each is one of those of /v1/batches (openai/batches.py), whose
input file is made of the requests of its body and whose answers are read as results."""

import os
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated as A
from typing import BinaryIO, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from runtime.errors import InternalFault, InvalidRequest, NotFound
from runtime.http.body import discard_body
from runtime.http.errors import AnthropicError, anthropic_error
from runtime.http.fields.query import limit_of
from runtime.http.openai.batch_lines import AnswerLine, answer_line
from runtime.http.openai.batch_runner import BatchRunner
from runtime.http.openai.batches import (
    ENDED,
    MAX_LINES,
    MESSAGES,
    WINDOW_S,
    Batch,
    Batches,
    Counts,
    Record,
    batches_of,
    check_number,
)
from runtime.http.openai.files import new_id
from runtime.http.openai.stored.folder import open_private
from runtime.http.openai.stored.upload import store_bytes
from runtime.http.operation import HELLO, Operation, json_response
from runtime.http.settings import HttpSettings
from runtime.http.tenant_service import tenant_in
from runtime.json_value import JsonDict
from runtime.messages.tenants import Tenant

ENDPOINT = "/v1/messages"  # that answers the requests
READ_BYTES = 2**20  # of results, at once

CustomId = A[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a batch."""

    custom_id: CustomId
    params: JsonDict  # a body of /v1/messages; a wrong one is an error in the results


class MessageBatchBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages/batches."""

    requests: A[list[BatchRequest], Meta(min_length=1, max_length=MAX_LINES)]


class RequestCounts(Struct, frozen=True, kw_only=True):
    """Requests of a batch; all are `processing` until it ends."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(Struct, frozen=True, kw_only=True):
    """Anthropic's batch object."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: RequestCounts
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    cancel_initiated_at: datetime | None
    archived_at: datetime | None
    results_url: str | None


class MessageBatchPage(Struct, frozen=True):
    """A page of batches, the newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedBatch(Struct, frozen=True):
    """A batch that was deleted."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class Result(Struct, frozen=True, kw_only=True):
    """What became of a request."""

    type: Literal["succeeded", "errored", "canceled", "expired"]
    message: msgspec.Raw | UnsetType = UNSET
    error: msgspec.Raw | AnthropicError | UnsetType = UNSET


class ResultLine(Struct, frozen=True):
    """A line of the results."""

    custom_id: str
    result: Result


CREATE = Operation(
    "POST",
    "/v1/messages/batches",
    "Answer many conversations in idle time (--file-storage-path)",
    body=MessageBatchBody,
    example={
        "requests": [
            {"custom_id": "first", "params": {"model": "default", "max_tokens": 16, "messages": HELLO}}
        ]
    },
    answers=(MessageBatch,),
)
LIST = Operation(
    "GET",
    "/v1/messages/batches",
    "The batches of conversations",
    query=("after_id", "before_id", "limit"),
    answers=(MessageBatchPage,),
)
GET = Operation("GET", "/v1/messages/batches/{id}", "A batch of conversations", answers=(MessageBatch,))
DELETE = Operation(
    "DELETE", "/v1/messages/batches/{id}", "Delete a batch that has ended", answers=(DeletedBatch,)
)
CANCEL = Operation(
    "POST", "/v1/messages/batches/{id}/cancel", "Stop a batch of conversations", answers=(MessageBatch,)
)
RESULTS = Operation(
    "GET", "/v1/messages/batches/{id}/results", "The answers of a batch, as lines of JSON", media="binary"
)
OPERATIONS = (CREATE, LIST, GET, DELETE, CANCEL, RESULTS)


class MessageBatches:
    """Anthropic's batches among those of one folder."""

    def __init__(self, batches: Batches, runner: BatchRunner) -> None:
        self._batches = batches
        self._runner = runner

    def routes(self, settings: HttpSettings) -> list[Route]:
        """The routes of /v1/messages/batches."""
        return [
            CREATE.body_route(self._create, settings.max_body_bytes, settings.unknown_fields),
            LIST.json_route(self._list),
            GET.json_route(lambda request: shown(self._find(request))),
            DELETE.route(self._delete),
            CANCEL.route(self._cancel),
            RESULTS.route(self._results),
        ]

    def _find(self, request: Request) -> Record:
        tenant = tenant_in(request.scope)
        return self._batches.find(request.path_params["id"], tenant, is_messages=True)

    async def _create(self, tenant: Tenant, body: MessageBatchBody) -> MessageBatch:
        batches, files = self._batches, self._batches.files
        _check_names(body.requests)
        check_number(batches.known.values(), tenant)
        files.check_number(tenant)
        batch_id = new_id(MESSAGES)
        lines = await files.disk.run(partial(_lines, body.requests))
        file = await store_bytes(lines, f"{batch_id}.jsonl", "batch", files, tenant.name)
        now = int(time.time())
        batch = Batch(
            id=batch_id,
            endpoint=ENDPOINT,
            input_file_id=file.id,
            completion_window="24h",
            status="validating",
            created_at=now,
            expires_at=now + WINDOW_S,
            request_counts=Counts(len(body.requests)),
        )
        record = Record(batch=batch, output_id=new_id("file"), error_id=new_id("file"), owner=tenant.name)
        try:
            await batches.create(record, tenant)
        except BaseException:
            await files.delete(file.id, tenant)
            raise
        self._runner.add(record)
        return shown(record)

    def _list(self, request: Request) -> MessageBatchPage:
        tenant = tenant_in(request.scope)
        records = batches_of(self._batches.known.values(), tenant, is_messages=True)
        batches = [shown(one) for one in records[::-1]]
        limit = limit_of(request, 1000, 20)
        ids = [one.id for one in batches]
        after, before = (request.query_params.get(name) for name in ("after_id", "before_id"))
        for name, value in (("after_id", after), ("before_id", before)):
            if value is not None and value not in ids:
                raise InvalidRequest(f"{name} names nothing in this list: {value[:80]}", param=name)
        if before is not None:
            page = batches[: ids.index(before)]
            has_more, page = len(page) > limit, page[-limit:]
        else:
            rest = batches if after is None else batches[ids.index(after) + 1 :]
            has_more, page = len(rest) > limit, rest[:limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return MessageBatchPage(page, has_more, first, last)

    async def _cancel(self, request: Request) -> Response:
        await discard_body(request.receive)
        record = self._find(request)
        if record.batch.status not in ENDED:
            await self._runner.cancel(record)
        return json_response(shown(record))

    async def _delete(self, request: Request) -> Response:
        """Deletes the record and the files of a batch."""
        await discard_body(request.receive)
        record, files, tenant = self._find(request), self._batches.files, tenant_in(request.scope)
        if record.batch.status not in ENDED:
            raise InvalidRequest("the batch has not ended; cancel it first, or wait for its end")
        for file_id in (record.batch.input_file_id, record.output_id, record.error_id):
            if file_id in files.known:
                await files.delete(file_id, tenant)
        await files.disk.run(lambda: self._batches.erase(record))
        self._batches.known.pop(record.batch.id, None)
        return json_response(DeletedBatch(record.batch.id))

    async def _results(self, request: Request) -> Response:
        record = self._find(request)
        if record.batch.status not in ENDED:
            raise NotFound("the batch has no results yet; wait until its processing_status is ended")
        return StreamingResponse(self._result_lines(record), media_type="application/x-jsonl")

    async def _result_lines(self, record: Record) -> AsyncIterator[bytes]:
        """The results, some at a time. Raises StorageUnavailable."""
        disk = self._batches.files.disk
        for file_id in (record.batch.output_file_id, record.batch.error_file_id):
            if file_id not in self._batches.files.known:
                continue
            file = await disk.run(partial(_opened, self._batches.files.path(file_id)))
            try:
                while lines := await disk.run(partial(_read_results, file)):
                    yield lines
            finally:
                disk.soon(file.close)


def shown(record: Record) -> MessageBatch:
    """A batch as Anthropic's API shows it."""
    batch, counts = record.batch, record.batch.request_counts
    is_over = batch.status in ENDED
    if is_over:
        cut = record.num_cut_off
        requests = RequestCounts(
            succeeded=counts.completed,
            errored=counts.total - counts.completed - cut,
            canceled=cut if batch.status == "cancelled" else 0,
            expired=cut if batch.status == "expired" else 0,
        )
    else:
        requests = RequestCounts(processing=counts.total)
    return MessageBatch(
        id=batch.id,
        processing_status="ended"
        if is_over
        else "canceling"
        if batch.status == "cancelling"
        else "in_progress",
        request_counts=requests,
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at),
        ended_at=_time(getattr(batch, f"{batch.status}_at")) if is_over else None,
        cancel_initiated_at=None if batch.cancelling_at is None else _time(batch.cancelling_at),
        archived_at=None,
        results_url=f"/v1/messages/batches/{batch.id}/results" if is_over else None,
    )


def _check_names(requests: list[BatchRequest]) -> None:
    """Raises InvalidRequest for a custom_id that comes twice."""
    seen: set[str] = set()
    for i, request in enumerate(requests):
        if request.custom_id in seen:
            raise InvalidRequest(
                f"requests[{i}]: another request has this custom_id", param=f"requests[{i}].custom_id"
            )
        seen.add(request.custom_id)


def _time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _lines(requests: list[BatchRequest]) -> bytearray:
    """The input file of a batch."""
    return bytearray().join(
        msgspec.json.encode(
            {"custom_id": one.custom_id, "method": "POST", "url": ENDPOINT, "body": one.params}
        )
        + b"\n"
        for one in requests
    )


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(open_private(path, os.O_RDONLY), "rb")


def _read_results(file: BinaryIO) -> bytes:
    """The next results in an output file; b"" at its end. Blocking. Raises OSError."""
    lines = [line for raw in file.readlines(READ_BYTES) if (line := answer_line(raw)) is not None]
    return b"".join(msgspec.json.encode(_result(line)) + b"\n" for line in lines)


def _result(line: AnswerLine) -> ResultLine:
    """A line of an output file as a result."""
    if line.response is not None:
        body = line.response.body
        is_good = line.response.status_code == 200
        return ResultLine(
            line.custom_id,
            Result(type="succeeded", message=body) if is_good else Result(type="errored", error=body),
        )
    if line.error is not None and line.error.code in CUT_OFF:
        return ResultLine(line.custom_id, Result(type=CUT_OFF[line.error.code]))
    fault = anthropic_error(InternalFault("the server has no answer to this request; ask again"))
    return ResultLine(line.custom_id, Result(type="errored", error=fault))


CUT_OFF: dict[str, Literal["canceled", "expired"]] = {
    "batch_cancelled": "canceled",
    "batch_expired": "expired",
}
