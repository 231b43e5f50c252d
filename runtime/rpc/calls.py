"""The methods of the gRPC service. A request takes the same path as POST /generate; only its encoding
differs."""

from collections.abc import Awaitable, Callable

import anyio
from anyio.to_thread import run_sync
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from msgspec import Struct
from starlette.datastructures import Headers

from runtime.errors import InvalidRequest, Overloaded, RequestError
from runtime.http.embeddings.embedding_response import Embeddings
from runtime.http.embeddings.embeddings import embeddings
from runtime.http.errors import renamed
from runtime.http.fields.headers import read_headers
from runtime.http.json_weight import UNWEIGHED_BYTES, check_weight
from runtime.http.native.generate import generate
from runtime.http.native.generate_answer import GenerateAnswerFormat
from runtime.http.settings import HttpSettings
from runtime.http.streaming import large
from runtime.http.streaming.exchange import Exchange
from runtime.http.streaming.pace import merged
from runtime.http.streaming.sse import encode
from runtime.http.streaming.stream import MAX_WAITING_TOKENS
from runtime.http.tenant_service import service_for
from runtime.json_value import Fields
from runtime.messages.cost import check_cost
from runtime.messages.requests import Delta, Finish, TokenLogprob
from runtime.messages.tenants import Tenant
from runtime.rpc.schema import load
from runtime.service import Service

STUCK_S = 30.0  # for which a client may take nothing of what waits for it
NUMBERS = ("sampling_seed", "priority")  # 64-bit numbers are strings in the JSON of protobuf


Write = Callable[[Message], Awaitable[None]]  # returns when the message is on its way


class Caller(Struct, frozen=True):
    """Who makes a call: its tenant, and its metadata as headers."""

    tenant: Tenant
    headers: list[tuple[bytes, bytes]]


class Calls:
    """The methods of the service, apart from gRPC itself. All raise RequestError."""

    def __init__(self, service: Service, settings: HttpSettings) -> None:
        self.service = service
        self.settings = settings
        self.types, _ = load()

    async def health(self, _: Message, __: Caller) -> Message:
        """-> HealthResponse"""
        health = self.service.health()
        return self.types["HealthResponse"](
            state=health.state, detail=health.detail, model=self.service.card.name
        )

    async def embed(self, request: Message, caller: Caller) -> Message:
        """-> EmbedResponse"""
        body = await self._body(request)
        content = encode({"input": body.pop("texts", [])} | body)
        await check_weight(content, self.settings.max_body_bytes)
        answer = embeddings(self._service_of(caller), content)
        answer.exchange.apply_headers(read_headers(Headers(raw=caller.headers), self.settings.label_header))
        result = await answer.complete()
        assert isinstance(result, Embeddings)
        vectors = [self.types["Embedding"](values=one.embedding) for one in result.data]
        return self.types["EmbedResponse"](embeddings=vectors, prompt_tokens=result.usage.prompt_tokens)

    async def abort(self, request: Message, caller: Caller) -> Message:
        """-> AbortResponse"""
        if not request.rid:
            raise InvalidRequest("give rid, the beginning of the ids of the requests to abort", param="rid")
        aborted = self.service.control.abort(request.rid, caller.tenant)
        return self.types["AbortResponse"](aborted=aborted)

    async def generate(self, request: Message, caller: Caller, write: Write) -> None:
        """Writes GenerateResponse messages."""
        content = encode(await self._body(request))
        await check_weight(content, self.settings.max_body_bytes)
        answer = generate(self._service_of(caller), content)
        exchange = answer.exchange
        assert isinstance(answer.answer_format, GenerateAnswerFormat)
        exchange.apply_headers(read_headers(Headers(raw=caller.headers), self.settings.label_header))
        waiting = Waiting(exchange)
        try:
            check_cost(exchange.requests, self.service.card.limits)
            exchange.submit(waiting.take)
            while not exchange.is_over or waiting.deltas:
                if not waiting.deltas:
                    await exchange.ready.wait()
                for choice, delta in waiting.all():
                    fields = exchange.requests[0].id, choice, answer.answer_format.visible(choice, delta)
                    is_large = large.is_large({choice: delta})
                    await waiting.send(
                        write,
                        await large.compute(self._response, *fields) if is_large else self._response(*fields),
                    )
        except RequestError as error:
            raise renamed(error, answer.names) from None
        finally:
            exchange.abort()
        if exchange.failure is not None:
            raise renamed(exchange.failure, answer.names)

    def _service_of(self, caller: Caller) -> Service:
        return service_for(self.service, caller.tenant)

    async def _body(self, request: Message) -> Fields:
        """The body of a request; a large one is made in a worker thread."""
        return body_of(request) if request.ByteSize() <= UNWEIGHED_BYTES else await run_sync(body_of, request)

    def _response(self, rid: str, choice: int, delta: Delta) -> Message:
        return self.types["GenerateResponse"](
            rid=rid,
            index=choice,
            text=delta.text,
            output_ids=delta.token_ids,
            prompt_tokens=delta.prompt_tokens,
            cached_tokens=delta.cached_tokens,
            logprobs=[self._logprob(token) for token in delta.logprobs or ()],
            finish=None if delta.finish is None else self._finish(delta.finish),
            hidden_states=[
                self.types["Embedding"](values=row) for part in delta.hidden or () for row in part
            ],
        )

    def _finish(self, end: Finish) -> Message:
        matched: Fields = {}
        if end.matched is not None:
            matched = {"matched" if isinstance(end.matched, str) else "matched_id": end.matched}
        return self.types["Finish"](
            reason=end.reason.value,
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_tokens=end.cached_tokens,
            **matched,
        )

    def _logprob(self, token: TokenLogprob) -> Message:
        kind = self.types["TokenLogprob"]
        return kind(
            id=token.token_id,
            logprob=token.logprob,
            top=[kind(id=i, logprob=p) for i, p in token.top],
            picked=[kind(id=i, logprob=p) for i, p in token.picked],
        )


class Waiting:
    """Deltas that gRPC has not sent yet, merged to one for each choice. A client that takes nothing is left
    when too much waits for it, or after STUCK_S."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.deltas: dict[int, Delta] = {}
        self.num_tokens = 0
        self.max_tokens = MAX_WAITING_TOKENS * sum(request.params.n for request in exchange.requests)
        self._sending: anyio.CancelScope | None = None

    def take(self, choice: int, delta: Delta) -> None:
        """Adds a delta."""
        waiting = self.deltas.get(choice)
        self.deltas[choice] = delta if waiting is None else merged(waiting, delta)
        self.num_tokens += len(delta.token_ids)
        for token in delta.logprobs or ():
            self.num_tokens += len(token.top) + len(token.picked)
        if self.num_tokens > self.max_tokens and self._sending is not None:
            self._sending.cancel()
        self.exchange.ready.set()

    def all(self) -> list[tuple[int, Delta]]:
        """Removes and returns all deltas."""
        deltas, self.deltas, self.num_tokens = self.deltas, {}, 0
        return list(deltas.items())

    async def send(self, write: Write, message: Message) -> None:
        """Sends a message. Raises Overloaded when the client does not take it."""
        with anyio.move_on_after(STUCK_S) as self._sending:
            await write(message)
        if self._sending.cancelled_caught:
            self.deltas.clear()
            raise Overloaded("the client takes nothing of its stream")
        self._sending = None


def body_of(request: Message) -> Fields:
    """The body of /generate with the fields that are set."""
    body: Fields = MessageToDict(request, preserving_proto_field_name=True)
    if "input_embeds" in body:
        body["input_embeds"] = [row.get("values", []) for row in body["input_embeds"]]
    for part in (body, body.get("sampling_params", {})):
        for name in NUMBERS:
            if name in part:
                part[name] = int(part[name])
    return body
