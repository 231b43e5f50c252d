"""The routes of /v1/responses, and the responses that are computed in the background."""

from collections.abc import Awaitable, Callable
from operator import itemgetter
from typing import Any

import anyio
from anyio.abc import TaskGroup
from msgspec import convert
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from runtime import log
from runtime.errors import InternalFault, InvalidRequest, Overloaded, RequestError, Unavailable
from runtime.http.body import read_body
from runtime.http.fields.headers import read_headers
from runtime.http.openai.chat import chat_prompt
from runtime.http.openai.completion_response import Deleted, ItemPage
from runtime.http.openai.files import page_of
from runtime.http.openai.responses import response_object as responses
from runtime.http.openai.responses.response_request import ResponseBody
from runtime.http.openai.responses.resumable_streams import ResumableStream, ResumableStreams
from runtime.http.openai.responses.serve import PreparedResponse, ResponseAnswerFormat, answer
from runtime.http.openai.responses.store import OPEN, ResponseStore, StoredResponse
from runtime.http.operation import Operation, json_response
from runtime.http.settings import HttpSettings
from runtime.http.streaming.answer_format import AnswerFormat
from runtime.http.streaming.exchange import Answer
from runtime.http.streaming.sse import HEADERS
from runtime.http.tenant_service import service_for, tenant_in
from runtime.service import Service

MAX_BACKGROUND = 256

CREATE = Operation(
    "POST",
    "/v1/responses",
    "Answer a conversation of items, and store the response",
    body=ResponseBody,
    example={"input": "Hello!", "max_output_tokens": 16},
    answers=(responses.Response,),
    events=(responses.ResponseEvent,),
    media="sse",
)
COUNT = Operation(
    "POST",
    "/v1/responses/input_tokens",
    "Count the tokens of what would be asked",
    body=ResponseBody,
    example={"input": "Hello!"},
    answers=(responses.InputTokens,),
)
GET = Operation(
    "GET",
    "/v1/responses/{id}",
    "A stored response; with stream, the events of one that was made in the background",
    query=("stream", "starting_after"),
    answers=(responses.Response,),
    events=(responses.ResponseEvent,),
)
DELETE = Operation("DELETE", "/v1/responses/{id}", "Delete a stored response", answers=(Deleted,))
CANCEL = Operation(
    "POST", "/v1/responses/{id}/cancel", "Cancel a response in the background", answers=(responses.Response,)
)
INPUT_ITEMS = Operation(
    "GET",
    "/v1/responses/{id}/input_items",
    "The input items of a stored response",
    query=("after", "limit", "order"),
    answers=(ItemPage,),
)
OPERATIONS = (CREATE, COUNT, GET, DELETE, CANCEL, INPUT_ITEMS)


class Responses:
    """The responses of one server. `run` runs those in the background."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self.service = service
        self.store = store
        self.resumable_streams = ResumableStreams()
        self._scopes: dict[str, anyio.CancelScope] = {}  # by response id, of background responses
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Runs background responses until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            self.store.close()

    def routes(self, settings: HttpSettings) -> list[Route]:
        """The routes of /v1/responses."""
        return [
            CREATE.route(self._creating(settings)),
            COUNT.route(self._counting(settings)),
            GET.route(self._get),
            DELETE.json_route(self._delete),
            CANCEL.json_route(self._cancel),
            INPUT_ITEMS.json_route(self._input_items),
        ]

    def _creating(self, settings: HttpSettings) -> Any:
        async def create(request: Request) -> ASGIApp:
            service = service_for(self.service, tenant_in(request.scope))
            prepared = PreparedResponse(
                service, self.store, await read_body(request.scope, request.receive, settings.max_body_bytes)
            )
            serving = answer(service, prepared, self.store.put)
            serving.exchange.apply_headers(read_headers(request.headers))
            serving.interval = settings.stream_interval
            if not prepared.body.background:
                return serving
            if self._tasks is None or len(self._scopes) >= MAX_BACKGROUND:
                raise Overloaded(
                    f"{len(self._scopes)} answers are computed in the background already; try again later"
                )
            prepared.response["status"] = "queued"
            record = prepared.record()
            self.store.put(record)
            stream = self.resumable_streams.open(record.id) if serving.is_stream else None
            queued: Response = json_response(convert(prepared.response, responses.Response))
            if stream is not None:
                assert isinstance(serving.answer_format, ResponseAnswerFormat)
                self.resumable_streams.append(stream, serving.answer_format.queued())
                queued = _follow(stream, 0)
            self._tasks.start_soon(self._complete, record, serving, stream)
            return queued

        return create

    def _counting(self, settings: HttpSettings) -> Any:
        async def count(request: Request) -> Response:
            service = service_for(self.service, tenant_in(request.scope))
            prepared = PreparedResponse(
                service, self.store, await read_body(request.scope, request.receive, settings.max_body_bytes)
            )
            ids = await self.service.control.tokenize(chat_prompt(prepared.chat))
            return json_response(responses.InputTokens("response.input_tokens", len(ids)))

        return count

    async def _complete(
        self, record: StoredResponse, serving: Answer, stream: ResumableStream | None
    ) -> None:
        """Computes one background response. Whatever happens, it ends in the store and in its stream."""
        response = record.response
        response["status"] = "in_progress"
        self.store.put(record)
        try:
            with anyio.CancelScope() as scope:
                self._scopes[record.id] = scope
                await (serving.complete() if stream is None else serving.stream_to(self._appending(stream)))
            if scope.cancelled_caught and record.id in self._scopes:
                response["status"] = "cancelled"
                self.store.put(record)
        except RequestError as error:
            self._fail(record, serving.answer_format, stream, error)
        except Exception:
            log.get("responses").exception(
                "an answer in the background failed", response=record.id, exc_info=True
            )
            self._fail(
                record,
                serving.answer_format,
                stream,
                InternalFault("something went wrong in the server; its log has the details"),
            )
        finally:
            self._scopes.pop(record.id, None)
            if stream is not None:
                stream.finish()

    def _appending(self, stream: ResumableStream) -> Callable[[bytes], Awaitable[None]]:
        async def append(events: bytes) -> None:
            self.resumable_streams.append(stream, events)

        return append

    def _fail(
        self,
        record: StoredResponse,
        answer_format: AnswerFormat,
        stream: ResumableStream | None,
        error: RequestError,
    ) -> None:
        events = answer_format.failure(error)
        if stream is not None:
            self.resumable_streams.append(stream, events)
        code = "rate_limit_exceeded" if isinstance(error, (Overloaded, Unavailable)) else "server_error"
        record.response.update(status="failed", error={"code": code, "message": error.message})
        self.store.put(record)

    async def _get(self, request: Request) -> Response:
        record = self.store.find(request.path_params["id"])
        if request.query_params.get("stream") != "true":
            return json_response(convert(record.response, responses.Response))
        after = request.query_params.get("starting_after")
        if after is not None and not after.isdecimal():
            raise InvalidRequest(
                "starting_after must be the sequence_number of an event", param="starting_after"
            )
        stream = self.resumable_streams.find(record.id)
        begin = 0 if after is None else int(after) + 1
        if stream is None or begin < stream.first:
            raise InvalidRequest(
                "the events of this response are not stored (any more): only those with background and "
                "stream are, for a while; leave stream out",
                param="stream",
            )
        return _follow(stream, begin)

    def _delete(self, request: Request) -> Any:
        response_id = request.path_params["id"]
        self.resumable_streams.drop(response_id)
        if (scope := self._scopes.pop(response_id, None)) is not None:
            scope.cancel()
        self.store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _cancel(self, request: Request) -> Any:
        record = self.store.find(request.path_params["id"])
        if not record.response["background"]:
            raise InvalidRequest(
                "only answers in the background can be cancelled; close the connection of others",
                param="response_id",
            )
        if (scope := self._scopes.get(record.id)) is not None and record.response["status"] in OPEN:
            scope.cancel()
            record.response["status"] = "cancelled"
        return record.response

    def _input_items(self, request: Request) -> Any:
        record = self.store.find(request.path_params["id"])
        limit = request.query_params.get("limit", "20")
        if not limit.isdigit() or not 1 <= int(limit) <= 100:
            raise InvalidRequest("limit must be a number from 1 to 100", param="limit")
        return page_of(
            [*record.context, *record.input],
            after=request.query_params.get("after"),
            limit=int(limit),
            order=request.query_params.get("order", "desc"),
            id_of=itemgetter("id"),
        )


def _follow(stream: ResumableStream, begin: int) -> Response:
    """The events of an answer in the background from `begin` on. A client that leaves ends nothing but
    this."""
    headers = {name.decode(): value.decode() for name, value in HEADERS}
    return StreamingResponse(stream.follow(begin), headers=headers)
