"""The exchange of one HTTP request with the runtime: its requests go in, deltas come out, and each request
ends exactly once.

    endpoint ─ requests, answer format ─► Answer ─ submit ─► Service
    client ◄── JSON, events ─── Answer ◄─ push ─── Service       (`take`, within the step's fan-out)

`Answer` is the ASGI application that an endpoint returns. It waits for the first output before it sends a
status, so that a refusal is a 4xx in streams too. Whatever ends it (the client leaves, an error, the server
stops), requests that still run are aborted.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import anyio
from msgspec import Raw, convert, structs
from starlette.types import Receive, Scope, Send

from runtime.actors.channels import Signal
from runtime.errors import Overloaded, RequestError
from runtime.http.cut_body import put_back
from runtime.http.errors import renamed
from runtime.http.fields.headers import RequestHeaders
from runtime.http.request_cycle import EXTENSION, RequestCycle
from runtime.http.streaming import large, sse
from runtime.http.streaming.answer_format import AnswerFormat, Output
from runtime.http.streaming.answer_reader import AnswerReader, ReaderSettings
from runtime.http.streaming.connection import Connection
from runtime.http.streaming.pace import Pace, Take
from runtime.http.streaming.rows import made
from runtime.http.streaming.stream import Stream
from runtime.messages.cost import check_cost, check_sequences, is_free
from runtime.messages.media import EncodedText
from runtime.messages.requests import Delta, GenerateRequest
from runtime.service import Service

T = TypeVar("T")

NO_HEADERS = RequestHeaders()
PIECE_BYTES = 256 * 1024  # of an answer in one piece, sent at once
MAX_SEND_S = 30.0  # that one ASGI send may take; our own server has the same limit in its connections


class Exchange:
    """The generation requests of one HTTP request while they run."""

    def __init__(self, service: Service, requests: list[GenerateRequest]) -> None:
        self.service = service
        self.requests = requests
        self.running: set[str] = set()
        self.failure: RequestError | None = None
        self.has_client_left = False
        self.ready = Signal()  # there is something to look at: first output, waiting output, or the end

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come, or nothing more is wanted."""
        return self.failure is not None or not self.running or self.has_client_left

    def apply_headers(self, headers: RequestHeaders) -> None:
        """Sets the fields that HTTP headers gave in all requests. To be called before `submit`."""
        fields = {
            name: value
            for name, value in structs.asdict(headers).items()
            if name != "bearer" and value != getattr(NO_HEADERS, name)
        }
        if fields:
            self.requests = [structs.replace(request, **fields) for request in self.requests]
        for number, request in enumerate(self.requests):
            if request.transfer is not None and request.transfer.bearer is not None:
                transfer = structs.replace(request.transfer, bearer=headers.bearer)
                self.requests[number] = structs.replace(request, transfer=transfer)

    def take_files(self, texts: Mapping[str, EncodedText]) -> bool:
        """Gives the requests the files that marks in their body stand for; False: some stand for something
        else. To be called before `submit`."""
        if (found := put_back(self.requests, texts)) is None:
            return False
        self.requests = found
        return True

    def submit(self, take: Take) -> None:
        """Submits the requests; `take` gets each delta. Raises what the service raises; none of the requests
        runs then."""
        choice = 0
        for request in self.requests:
            self.running.add(request.id)
            try:
                self.service.submit(request, RequestSink(self, request.id, take, choice, request.params.n))
            except BaseException:
                self.running.discard(request.id)
                self.abort()
                raise
            choice += request.params.n

    def finish(self, request_id: str) -> None:
        """One request has ended well."""
        self.running.discard(request_id)
        if not self.running:
            self.ready.set()

    def fail(self, request_id: str, error: RequestError) -> None:
        """One request has ended with an error; the first error becomes that of the exchange."""
        self.running.discard(request_id)
        self.failure = self.failure or error
        self.ready.set()

    def abort(self) -> None:
        """Aborts the requests that still run. The only caller of `service.abort`."""
        while self.running:
            self.service.abort(self.running.pop())

    def leave(self) -> None:
        """The client has left."""
        self.has_client_left = True
        self.ready.set()


class RequestSink:
    """Sink of one request: numbers its sequences from `first_choice` on."""

    __slots__ = ("exchange", "request_id", "take", "first_choice", "num_open")

    def __init__(self, exchange: Exchange, request_id: str, take: Take, first_choice: int, n: int) -> None:
        self.exchange = exchange
        self.request_id = request_id
        self.take = take
        self.first_choice = first_choice
        self.num_open = n

    def push(self, delta: Delta) -> None:
        """Passes a delta on, with the number of its choice."""
        self.take(self.first_choice + delta.index, delta)
        if delta.finish is not None:
            self.num_open -= 1
            if self.num_open == 0:
                self.exchange.finish(self.request_id)

    def fail(self, error: RequestError) -> None:
        """Ends the request with an error."""
        self.exchange.fail(self.request_id, error)


class Answer:
    """ASGI application that serves one request: as a stream of events, or in one piece."""

    def __init__(
        self,
        service: Service,
        requests: list[GenerateRequest],
        answer_format: AnswerFormat,
        *,
        is_stream: bool,
        names: Mapping[str, str],
        headers: list[tuple[bytes, bytes]] = sse.HEADERS,
        reading: ReaderSettings | None = None,
        is_repeated: bool = False,
    ) -> None:
        """`names` maps the service's field names to those of the client, for refusals. `headers` are those of
        a stream. `reading` is how the answers are read, where they are more than text. `is_repeated`: each
        event of the stream has everything so far. Raises InvalidRequest for too many sequences."""
        self.headers = headers
        self.answer_format = answer_format
        self.is_stream = is_stream
        self.names = names
        num_choices = check_sequences(requests)
        self.readers = [] if reading is None else [AnswerReader(reading) for _ in range(num_choices)]
        self.exchange = Exchange(service, requests)
        self.stream = Stream(answer_format, num_choices, self.exchange.ready.set)
        self.outputs = [] if is_stream else [Output() for _ in range(num_choices)]
        self.interval = 1  # tokens between two events of a choice
        self.is_free = all([is_free(request.params) for request in requests])  # text and token ids only
        self.is_repeated = is_stream and is_repeated
        # written in a thread, not on the event loop
        self.is_large = not self.is_free and large.may_be_large(requests, service.card.limits)
        self.is_large |= num_choices > large.MANY_CHOICES and not is_stream

    def _submit(self, take: Take) -> None:
        try:
            if not self.is_free:
                check_cost(
                    self.exchange.requests, self.exchange.service.card.limits, is_repeated=self.is_repeated
                )
            self.exchange.submit(self._reading(take) if self.readers else take)
        except RequestError as error:
            raise renamed(error, self.names) from None

    def _reading(self, take: Take) -> Take:
        def read(choice: int, delta: Delta) -> None:
            self.readers[choice].read(delta)
            take(choice, delta)

        return read

    def _take(self) -> Take:
        if not self.is_stream:
            return self._collect
        return self.stream.take if self.interval == 1 else Pace(self.stream.take, self.interval)

    def _collect(self, choice: int, delta: Delta) -> None:
        self.outputs[choice].add(delta)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError for a request that failed before anything of its answer was sent."""
        cycle: RequestCycle | None = None if self.is_large else scope.get(EXTENSION)
        self._submit(self._take())
        try:
            if cycle is not None:
                unsent = await self._answer_cycle(cycle, send)
            else:
                unsent = await self._answer_watching(receive, send)
        finally:
            self.stream.close()
            self.exchange.abort()
        if unsent is not None:
            raise renamed(unsent, self.names)

    async def _answer_cycle(self, cycle: RequestCycle, send: Send) -> RequestError | None:
        """Answers on a connection of our own, which reports when the client leaves. Returns what went wrong
        before anything was sent."""
        cycle.on_disconnect = self.exchange.leave
        if cycle.has_client_left:
            return None
        if self.is_stream:
            return await self._send_stream(cycle.connection, send)
        return await self._send_whole(send)

    async def _answer_watching(self, receive: Receive, send: Send) -> RequestError | None:
        """Answers through any ASGI server. Returns what went wrong before anything was sent."""
        unsent: RequestError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, receive, tasks.cancel_scope)
            if self.is_stream:
                unsent = await self._send_stream(None, send)
            else:
                unsent = await self._send_whole(send)
            tasks.cancel_scope.cancel()
        return unsent

    async def complete(self) -> object:
        """The whole answer as an `answer_format.answer_type`, or its JSON where it has many log
        probabilities or hidden states, for callers other than HTTP clients. Raises RequestError."""
        self._submit(self._collect)
        try:
            await self.exchange.ready.wait()
        finally:
            self.exchange.abort()
        if self.exchange.failure is not None:
            raise renamed(self.exchange.failure, self.names)
        if self.is_large and not self.is_free:
            return Raw(await large.compute(self._encoded))
        return self._body()

    async def _events(self) -> bytes:
        """The events of all deltas that wait."""
        waiting = self.stream.taken()
        if self.is_large and (self.is_repeated or large.is_large(waiting)):
            return await large.compute(self.stream.written, waiting)
        return self.stream.written(waiting)

    def _body(self) -> object:
        body = self.answer_format.body(self.outputs)
        return convert(body if self.is_free else made(body), self.answer_format.answer_type)

    def _encoded(self) -> bytes:
        """A large answer as JSON; its outputs are given up, which takes long, too."""
        body = large.encoded(self.answer_format.body(self.outputs))
        large.give_up(self.outputs)
        return body

    async def stream_to(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Passes the events of the stream to `write`, for callers other than HTTP clients. While `write`
        waits, deltas are coalesced. Raises RequestError when the request fails before its first event or too
        much waits."""
        exchange, stream = self.exchange, self.stream
        self._submit(self._take())
        try:
            await exchange.ready.wait()
            if exchange.failure is not None:
                raise renamed(exchange.failure, self.names)
            while not exchange.is_over:
                if stream.is_overrun:
                    raise Overloaded("the client takes nothing of its stream")
                if data := await self._events():
                    await write(data)
                else:
                    await exchange.ready.wait()
            await write(await self._last())
        finally:
            exchange.abort()

    async def _watch(self, receive: Receive, work: anyio.CancelScope) -> None:
        """Ends the work when the client leaves. The last send is left alone: the server may be in the middle
        of recycling."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.exchange.is_over:
            work.cancel()

    async def _send_whole(self, send: Send) -> RequestError | None:
        await self.exchange.ready.wait()
        if self.exchange.failure is not None:
            return self.exchange.failure
        if not self.exchange.has_client_left:
            await _send_json(
                send, await large.compute(self._encoded) if self.is_large else sse.encode(self._body())
            )
        return None

    async def _send_stream(self, connection: Connection | None, send: Send) -> RequestError | None:
        exchange, stream = self.exchange, self.stream
        await exchange.ready.wait()
        if exchange.failure is not None:
            return exchange.failure
        if exchange.has_client_left:
            return None
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})
        if connection is not None:
            stream.open(connection)
            while not (exchange.is_over or stream.is_overrun):
                await exchange.ready.wait()
            if not exchange.is_over:
                connection.cut()
                return None
            if exchange.has_client_left:
                return None
        elif not await self._relay(send):
            return None
        stream.close()
        await send({"type": "http.response.body", "body": await self._last(), "more_body": False})
        return None

    async def _last(self) -> bytes:
        """The events of what waits, then the end of the stream: formats count tokens while they write."""
        waiting = await self._events()
        return waiting + (
            self.answer_format.failure(self.exchange.failure)
            if self.exchange.failure
            else self.answer_format.tail()
        )

    async def _relay(self, send: Send) -> bool:
        """Sends what waits through ASGI until all is produced. False: the client takes nothing; leaving
        closes its connection."""
        while not self.exchange.is_over:
            if self.stream.is_overrun:
                return False
            if data := await self._events():
                with anyio.move_on_after(MAX_SEND_S) as limit:
                    self.stream.on_overrun = limit.cancel
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                self.stream.on_overrun = None
                if limit.cancelled_caught:
                    return False
            else:
                await self.exchange.ready.wait()
        return True


async def _send_json(send: Send, body: bytes) -> None:
    """Sends an answer, a piece at a time."""
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for at in range(0, len(body), PIECE_BYTES):
        piece = body[at : at + PIECE_BYTES]
        more = at + PIECE_BYTES < len(body)
        await send({"type": "http.response.body", "body": piece, "more_body": more})
