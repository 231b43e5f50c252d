"""The routes of /v1/responses, and the answers that are computed in the background."""

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
from runtime.http.fields.headers import origin
from runtime.http.openai.chat import chat_prompt
from runtime.http.openai.completion_response import Deleted, ItemPage
from runtime.http.openai.files import page_of
from runtime.http.openai.responses import response_object as responses
from runtime.http.openai.responses.response_request import ResponseBody
from runtime.http.openai.responses.resumable_streams import ResumableStream, ResumableStreams
from runtime.http.openai.responses.serve import ResponseAnswerFormat, Wish, answer
from runtime.http.openai.responses.store import OPEN, Kept, ResponseStore
from runtime.http.operation import Operation, json_response
from runtime.http.settings import HttpSettings
from runtime.http.streaming.exchange import Answer
from runtime.http.streaming.sse import HEADERS
from runtime.http.streaming.writer import AnswerFormat
from runtime.service import Service

MAX_BACKGROUND = 256

CREATE = Operation(
    "POST",
    "/v1/responses",
    "Answer a conversation of items, and keep the answer",
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
    "A kept answer, or its events, where it was made in the background as a stream",
    query=("stream", "starting_after"),
    answers=(responses.Response,),
    events=(responses.ResponseEvent,),
)
DELETE = Operation("DELETE", "/v1/responses/{id}", "Forget a kept answer", answers=(Deleted,))
CANCEL = Operation(
    "POST", "/v1/responses/{id}/cancel", "Stop an answer in the background", answers=(responses.Response,)
)
INPUT_ITEMS = Operation(
    "GET",
    "/v1/responses/{id}/input_items",
    "What a kept answer was asked with",
    query=("after", "limit", "order"),
    answers=(ItemPage,),
)
OPERATIONS = (CREATE, COUNT, GET, DELETE, CANCEL, INPUT_ITEMS)


class Responses:
    """The answers of one server. `run` is the life of those in the background."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self.service = service
        self.store = store
        self.resumable_streams = ResumableStreams()
        self._scopes: dict[str, anyio.CancelScope] = {}  # of answers in the background
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled."""
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
            wish = Wish(
                self.service,
                self.store,
                await read_body(request.scope, request.receive, settings.max_body_bytes),
            )
            serving = answer(self.service, wish, self.store.put)
            serving.exchange.come_from(origin(request.headers, settings.tenant_is))
            serving.interval = settings.stream_interval
            if not wish.body.background:
                return serving
            if self._tasks is None or len(self._scopes) >= MAX_BACKGROUND:
                raise Overloaded(
                    f"{len(self._scopes)} answers are computed in the background already; try again later"
                )
            wish.response["status"] = "queued"
            kept = wish.kept()
            self.store.put(kept)
            trail = self.resumable_streams.open(kept.id) if serving.is_stream else None
            queued: Response = json_response(convert(wish.response, responses.Response))
            if trail is not None:
                assert isinstance(serving.answer_format, ResponseAnswerFormat)
                self.resumable_streams.say(trail, serving.answer_format.queued())
                queued = _following(trail, 0)
            self._tasks.start_soon(self._complete, kept, serving, trail)
            return queued

        return create

    def _counting(self, settings: HttpSettings) -> Any:
        async def count(request: Request) -> Response:
            wish = Wish(
                self.service,
                self.store,
                await read_body(request.scope, request.receive, settings.max_body_bytes),
            )
            ids = await self.service.control.tokenize(chat_prompt(wish.chat))
            return json_response(responses.InputTokens("response.input_tokens", len(ids)))

        return count

    async def _complete(self, kept: Kept, serving: Answer, trail: ResumableStream | None) -> None:
        """One answer in the background. It ends in the store and in its trail, whatever happens."""
        response = kept.response
        response["status"] = "in_progress"
        self.store.put(kept)
        try:
            with anyio.CancelScope() as scope:
                self._scopes[kept.id] = scope
                await (serving.complete() if trail is None else serving.tell(self._saying(trail)))
            if scope.cancelled_caught and kept.id in self._scopes:
                response["status"] = "cancelled"
                self.store.put(kept)
        except RequestError as error:
            self._fail(kept, serving.answer_format, trail, error)
        except Exception:
            log.get("responses").exception(
                "an answer in the background failed", response=kept.id, exc_info=True
            )
            self._fail(
                kept,
                serving.answer_format,
                trail,
                InternalFault("something went wrong in the server; its log has the details"),
            )
        finally:
            self._scopes.pop(kept.id, None)
            if trail is not None:
                trail.finish()

    def _saying(self, trail: ResumableStream) -> Callable[[bytes], Awaitable[None]]:
        async def say(events: bytes) -> None:
            self.resumable_streams.say(trail, events)

        return say

    def _fail(
        self, kept: Kept, answer_format: AnswerFormat, trail: ResumableStream | None, error: RequestError
    ) -> None:
        events = answer_format.failure(error)
        if trail is not None:
            self.resumable_streams.say(trail, events)
        code = "rate_limit_exceeded" if isinstance(error, (Overloaded, Unavailable)) else "server_error"
        kept.response.update(status="failed", error={"code": code, "message": error.message})
        self.store.put(kept)

    async def _get(self, request: Request) -> Response:
        kept = self.store.find(request.path_params["id"])
        if request.query_params.get("stream") != "true":
            return json_response(convert(kept.response, responses.Response))
        after = request.query_params.get("starting_after")
        if after is not None and not after.isdecimal():
            raise InvalidRequest(
                "starting_after must be the sequence_number of an event", param="starting_after"
            )
        trail = self.resumable_streams.find(kept.id)
        begin = 0 if after is None else int(after) + 1
        if trail is None or begin < trail.first:
            raise InvalidRequest(
                "the events of this response are not kept (any more): only those with background and stream are, for a "
                "while; leave stream out",
                param="stream",
            )
        return _following(trail, begin)

    def _delete(self, request: Request) -> Any:
        response_id = request.path_params["id"]
        self.resumable_streams.forget(response_id)
        if (scope := self._scopes.pop(response_id, None)) is not None:
            scope.cancel()
        self.store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _cancel(self, request: Request) -> Any:
        kept = self.store.find(request.path_params["id"])
        if not kept.response["background"]:
            raise InvalidRequest(
                "only answers in the background can be cancelled; close the connection of others",
                param="response_id",
            )
        if (scope := self._scopes.get(kept.id)) is not None and kept.response["status"] in OPEN:
            scope.cancel()
            kept.response["status"] = "cancelled"
        return kept.response

    def _input_items(self, request: Request) -> Any:
        kept = self.store.find(request.path_params["id"])
        limit = request.query_params.get("limit", "20")
        if not limit.isdigit() or not 1 <= int(limit) <= 100:
            raise InvalidRequest("limit must be a number from 1 to 100", param="limit")
        return page_of(
            [*kept.context, *kept.input],
            after=request.query_params.get("after"),
            limit=int(limit),
            order=request.query_params.get("order", "desc"),
            id_of=itemgetter("id"),
        )


def _following(trail: ResumableStream, begin: int) -> Response:
    """The events of an answer in the background from `begin` on. A client that leaves ends nothing but
    this."""
    headers = {name.decode(): value.decode() for name, value in HEADERS}
    return StreamingResponse(trail.follow(begin), headers=headers)
