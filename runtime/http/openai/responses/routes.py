"""The routes of /v1/responses, and the responses that are computed in the background."""

from asyncio import get_running_loop
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from operator import itemgetter

import anyio
from anyio import from_thread
from msgspec import Struct, convert
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from runtime.errors import InternalFault, InvalidRequest, Overloaded, RequestError, Unavailable
from runtime.http.body import discard_body, read_cut_body
from runtime.http.cut_body import attempt_later, put_back_files
from runtime.http.fields.headers import read_headers
from runtime.http.fields.media import MediaParts
from runtime.http.fields.query import limit_of, whole_number
from runtime.http.openai.chat import chat_prompt
from runtime.http.openai.completion_response import Deleted, ItemPage
from runtime.http.openai.conversations.store import ConversationStore
from runtime.http.openai.files import page_of
from runtime.http.openai.responses import response_object as responses
from runtime.http.openai.responses.compact import CompactAnswerFormat, CompactBody, Compacted, read_compaction
from runtime.http.openai.responses.response_request import ResponseBody
from runtime.http.openai.responses.resumable_streams import ResumableStream, ResumableStreams
from runtime.http.openai.responses.serve import (
    PreparedResponse,
    ResponseAnswerFormat,
    answer,
    answer_as,
    read_response,
)
from runtime.http.openai.responses.store import OPEN, ResponseStore, StoredResponse
from runtime.http.openai.stored.tasks import StoredTask, StoredTasks
from runtime.http.operation import Endpoint, Operation, json_response
from runtime.http.settings import HttpSettings
from runtime.http.streaming.exchange import Answer
from runtime.http.streaming.sse import HEADERS
from runtime.http.tenant_service import service_for, tenant_in
from runtime.http.unknown_fields import warned
from runtime.messages.media import EncodedText, MediaSource
from runtime.messages.requests import Prompt
from runtime.messages.tenants import Tenant
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
COMPACT = Operation(
    "POST",
    "/v1/responses/compact",
    "A shorter window of items in place of a conversation",
    body=CompactBody,
    example={"input": "Hello!"},
    answers=(Compacted,),
)
OPERATIONS = (CREATE, COUNT, COMPACT, GET, DELETE, CANCEL, INPUT_ITEMS)


class Running(Struct, frozen=True):
    """What ends a response that is computed in the background, and whose it is."""

    owner: str
    scope: anyio.CancelScope


class Background(Struct, frozen=True):
    """A response that is computed in the background."""

    record: StoredResponse
    texts: Mapping[str, EncodedText]  # what marks in its input stand for (http/cut_body.py)
    serving: Answer
    stream: ResumableStream | None
    scope: anyio.CancelScope


class Responses:
    """The responses of one server. Those in the background run in `tasks`."""

    def __init__(
        self, service: Service, store: ResponseStore, conversations: ConversationStore, tasks: StoredTasks
    ) -> None:
        self.service = service
        self.store = store
        self.conversations = conversations
        self.resumable_streams = ResumableStreams(tenant_quota=store.kept.tenant_quota)
        self._running: dict[str, Running] = {}  # by response id, of background responses
        self._tasks = tasks
        if store.table is not None:
            for one in (store, conversations):
                tasks.start(StoredTask("response_writer", one.name, one.run, one.run))

    def routes(self, settings: HttpSettings) -> list[Route]:
        """The routes of /v1/responses."""
        return [
            CREATE.route(self._creating(settings)),
            COUNT.route(self._counting(settings)),
            COMPACT.route(self._compacting(settings)),
            GET.route(self._get),
            DELETE.route(self._delete),
            CANCEL.route(self._cancel),
            INPUT_ITEMS.route(self._input_items),
        ]

    async def _prepared(
        self, service: Service, settings: HttpSettings, content: bytes, read: Callable[[bytes], ResponseBody]
    ) -> tuple[PreparedResponse, list[str]]:
        """-> the request, and unknown fields of it that were ignored"""
        body, ignored = settings.unknown_fields.attempt(read, content, CREATE.path)
        return await PreparedResponse.read(service, self.store, self.conversations, body), ignored

    def _creating(self, settings: HttpSettings) -> Endpoint:
        async def create(request: Request) -> ASGIApp:
            service = service_for(self.service, tenant_in(request.scope))

            async def take(content: bytes) -> tuple[PreparedResponse, list[str], Answer]:
                prepared, ignored = await self._prepared(service, settings, content, read_response)
                return prepared, ignored, answer(service, prepared, self._keep)

            def keep(taken: tuple[PreparedResponse, list[str], Answer]) -> bool:
                prepared, _, serving = taken
                prepared.texts = body.texts
                # items join conversations whole
                return prepared.conversation is None and serving.exchange.take_files(body.texts)

            body = await read_cut_body(request.scope, request.receive, settings.max_body_bytes)
            prepared, ignored, serving = await attempt_later(body, take, keep)
            serving.exchange.apply_headers(read_headers(request.headers, settings.label_header))
            serving.interval = settings.stream_interval
            if prepared.body.background:
                return warned(await self._start(prepared, serving, service.tenant), ignored)
            if prepared.body.store:
                self.store.check()
            if prepared.conversation is not None:
                self.conversations.check()
            return warned(serving, ignored)

        return create

    def _keep(self, prepared: PreparedResponse) -> None:
        """Stores a response at its end, and has its items join their conversation if it did not fail."""
        if prepared.is_stored:
            self.store.put(prepared.record(), prepared.texts)
        if prepared.conversation is None or prepared.response["status"] not in ("completed", "incomplete"):
            return
        join = partial(
            self.conversations.join, prepared.conversation, [*prepared.input, *prepared.response["output"]]
        )
        try:
            get_running_loop()
        except RuntimeError:  # in a thread, with an answer that is large
            from_thread.run_sync(join)
        else:
            join()

    async def _start(self, prepared: PreparedResponse, serving: Answer, tenant: Tenant) -> Response:
        """Starts a background response. Raises Overloaded, StorageFull, StorageUnavailable."""
        num_own = sum(one.owner == tenant.name for one in self._running.values())
        is_full = len(self._running) >= MAX_BACKGROUND or num_own >= tenant.most(MAX_BACKGROUND)
        if not self._tasks.is_running or is_full:
            raise Overloaded(
                f"as many answers are computed in the background as may be, {num_own} of them yours; try "
                "again later"
            )
        prepared.response["status"] = "queued"
        record = prepared.record()
        scope = anyio.CancelScope()
        self._running[record.id] = Running(record.owner, scope)
        try:
            await self.store.create(record, prepared.texts)
        except BaseException:
            del self._running[record.id]
            raise
        stream = self.resumable_streams.open(record.id, record.owner) if serving.is_stream else None
        queued: Response = json_response(convert(prepared.response, responses.Response))
        if stream is not None:
            assert isinstance(serving.answer_format, ResponseAnswerFormat)
            self.resumable_streams.append(stream, serving.answer_format.queued())
            queued = _follow(stream, 0)
        task = Background(record, prepared.texts, serving, stream, scope)
        fault = InternalFault("something went wrong in the server; its log has the details")
        self._tasks.start(
            StoredTask("response", record.id, partial(self._complete, task), partial(self._fail, task, fault))
        )
        return queued

    def _compacting(self, settings: HttpSettings) -> Endpoint:
        async def compact(request: Request) -> ASGIApp:
            service = service_for(self.service, tenant_in(request.scope))
            body = await read_cut_body(request.scope, request.receive, settings.max_body_bytes)
            # user messages come back as they are, with the files in them
            prepared, ignored = await self._prepared(service, settings, body.whole, read_compaction)
            serving = answer_as(service, prepared, CompactAnswerFormat(service, prepared))
            serving.exchange.apply_headers(read_headers(request.headers, settings.label_header))
            return warned(serving, ignored)

        return compact

    def _counting(self, settings: HttpSettings) -> Endpoint:
        async def count(request: Request) -> ASGIApp:
            service = service_for(self.service, tenant_in(request.scope))

            async def take(content: bytes) -> tuple[Prompt, list[MediaSource], list[str]]:
                prepared, ignored = await self._prepared(service, settings, content, read_response)
                media = MediaParts(service.card.limits.media_kinds)
                return chat_prompt(prepared.chat, media), media.sources, ignored

            def keep(taken: tuple[Prompt, list[MediaSource], list[str]]) -> bool:
                files = put_back_files(taken[1], body.texts)
                taken[1][:] = files or []
                return files is not None

            body = await read_cut_body(request.scope, request.receive, settings.max_body_bytes)
            prompt, sources, ignored = await attempt_later(body, take, keep)
            ids = await self.service.control.tokenize(prompt, sources)
            tokens = responses.InputTokens("response.input_tokens", len(ids))
            return warned(json_response(tokens), ignored)

        return count

    async def _complete(self, task: Background) -> None:
        """Computes one background response."""
        record, response, stream = task.record, task.record.response, task.stream
        response["status"] = "in_progress"
        self.store.put(record, task.texts)
        try:
            with task.scope as scope:
                await (
                    task.serving.complete()
                    if stream is None
                    else task.serving.stream_to(self._appending(stream))
                )
            if scope.cancelled_caught and record.id in self._running:
                response["status"] = "cancelled"
                self.store.put(record, task.texts)
            self._finish(task)
        except RequestError as error:
            await self._fail(task, error)

    async def _fail(self, task: Background, error: RequestError) -> None:
        """Ends a background response with an error, in the store and in its stream."""
        record, stream = task.record, task.stream
        code = "rate_limit_exceeded" if isinstance(error, (Overloaded, Unavailable)) else "server_error"
        try:
            events = task.serving.answer_format.failure(error)
            if stream is not None:
                self.resumable_streams.append(stream, events)
        finally:
            record.response.update(status="failed", error={"code": code, "message": error.message})
            self.store.put(record, task.texts)
            self._finish(task)

    def _finish(self, task: Background) -> None:
        self._running.pop(task.record.id, None)
        if task.stream is not None:
            task.stream.finish()

    def _appending(self, stream: ResumableStream) -> Callable[[bytes], Awaitable[None]]:
        async def append(events: bytes) -> None:
            self.resumable_streams.append(stream, events)

        return append

    async def _get(self, request: Request) -> Response:
        record = await self.store.find(request.path_params["id"], tenant_in(request.scope))
        if request.query_params.get("stream") != "true":
            return json_response(convert(record.response, responses.Response))
        after = request.query_params.get("starting_after")
        number = whole_number(after)
        if after is not None and number is None:
            raise InvalidRequest(
                "starting_after must be the sequence_number of an event", param="starting_after"
            )
        stream = self.resumable_streams.find(record.id)
        begin = 0 if number is None else number + 1
        if stream is None or begin < stream.first:
            raise InvalidRequest(
                "the events of this response are not stored (any more): only those with background and "
                "stream are, for a while; leave stream out",
                param="stream",
            )
        return _follow(stream, begin)

    async def _delete(self, request: Request) -> Response:
        await discard_body(request.receive)
        response_id, tenant = request.path_params["id"], tenant_in(request.scope)
        stream, running = self.resumable_streams.find(response_id), self._running.get(response_id)
        if stream is not None and tenant.sees(stream.owner):
            self.resumable_streams.drop(response_id)
        if running is not None and tenant.sees(running.owner):
            del self._running[response_id]
            running.scope.cancel()
        await self.store.delete(response_id, tenant)
        return json_response(Deleted(response_id, "response", True))

    async def _cancel(self, request: Request) -> Response:
        await discard_body(request.receive)
        record = await self.store.find(request.path_params["id"], tenant_in(request.scope))
        if not record.response["background"]:
            raise InvalidRequest(
                "only answers in the background can be cancelled; close the connection of others",
                param="response_id",
            )
        if (running := self._running.get(record.id)) is not None and record.response["status"] in OPEN:
            running.scope.cancel()
            record.response["status"] = "cancelled"
        return json_response(convert(record.response, responses.Response))

    async def _input_items(self, request: Request) -> Response:
        record = await self.store.find(request.path_params["id"], tenant_in(request.scope))
        page = page_of(
            [*record.context, *record.input],
            after=request.query_params.get("after"),
            limit=limit_of(request, 100, 20),
            order=request.query_params.get("order", "desc"),
            id_of=itemgetter("id"),
        )
        return json_response(convert(page, ItemPage))


def _follow(stream: ResumableStream, begin: int) -> Response:
    """The events of an answer in the background from `begin` on. A client that leaves ends nothing but
    this."""
    headers = {name.decode(): value.decode() for name, value in HEADERS}
    return StreamingResponse(stream.follow(begin), headers=headers)
