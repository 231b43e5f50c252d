"""The side of a server that answers: fetches the pages of waiting sequences from the server that computes
their prompt.

    arrived(sequence) ─► held ─► Ask ─► pages into host pages ─► prefix tree ─► released

What comes is a part of the prefix cache like any other, in the order of the prompt. The sequence goes on when
all has come, and also when no more will come, for whatever reason: then it computes the rest here. The last
tokens of a prompt, one at least and a page at most, it computes in any case.

The first token of the answer comes before the last pages (scheduling/first_token.py), and goes to its client
at once. Where a grammar or something else that the other server does not know decides about it, it is sampled
here, so no state of a grammar or a sampler has to travel.
"""

from collections import defaultdict
from collections.abc import Callable
from time import monotonic

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import TaskGroup
from msgspec import Struct

from runtime import log
from runtime.cache.sequence import Sequence
from runtime.cache.storage_connector import StorageConnector, Wanted
from runtime.errors import LinkError
from runtime.messages.requests import TokenLogprob
from runtime.messages.scheduler import StepTokens
from runtime.messages.transfer import Ask, First, Found, Memory, PageLayout, Refused, ToDecode, Waiting
from runtime.scheduling.first_token import take_first, takes_first
from runtime.scheduling.scheduler import Scheduler
from runtime.transfer.incoming import ANSWERS, Incoming, Remote
from runtime.transfer.key import parse_source
from runtime.transfer.layout import RankPages, mismatch
from runtime.transfer.prompt_pages import PromptPages, has_left
from runtime.transfer.reading import Places
from runtime.transfer.rooms import Rooms
from runtime.transfer.transports import TCP, TIDY_S, Transport, is_of_this_machine
from runtime.transfer.wire import MOVES, Wire, connect, connect_local

LOG = log.get("transfer")
LOG_AGAIN_S = 60.0  # failures of one source are logged once in this time
IDLE_WIRES = 8  # of one source, kept for the next requests


class Received(Struct):
    """Counts since the start."""

    pages: int = 0
    bytes: int = 0
    fetches: int = 0
    failures: int = 0  # fetches that ended before all had come, whose prompts were computed here
    wait_s: float = 0.0  # for which sequences were held


class PageFetches:
    """Both halves of one replica: opens rooms for prompts that others ask for, and fetches pages. The
    scheduler actor calls it (Storage in actors/scheduler.py)."""

    def __init__(
        self,
        scheduler: Scheduler,
        pages: RankPages,
        rooms: Rooms,
        *,
        least_tokens: int,
        is_fake: bool,
        fakes_all: bool,
        identity: bytes,
        key: bytes,
        transport: Transport | None,
        vocab_size: int,
        wake: Callable[[], None],
    ) -> None:
        """`least_tokens`: prompts that lack fewer are computed here; `is_fake`: pages are made up, and with
        `fakes_all` for requests without another half as well; `identity`: of the pages; `key`: the secret of
        both servers; `transport`: by which the other one's memory is read, if it lets us; None: it sends.
        `vocab_size`: of the model."""
        self.received = Received()
        self._scheduler = scheduler
        self._pages = pages
        self._rooms = rooms
        self._identity = identity
        self._key = key
        self._least_pages = max(1, -(-least_tokens // scheduler.config.page_size))
        self._is_fake, self._fakes_all = is_fake, fakes_all
        self._transport = transport
        self._vocab_size = vocab_size
        self._wake = wake
        self._connector = StorageConnector(lambda: scheduler.cache, identity)
        self._threads = CapacityLimiter(MOVES)
        self._tasks: TaskGroup | None = None
        self._idle: defaultdict[str, list[Wire]] = defaultdict(list)
        self._logged_s: dict[str, float] = {}

    async def run(self) -> None:
        """Fetches until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                while True:
                    await anyio.sleep(TIDY_S)
                    if self._transport is not None:
                        await to_thread.run_sync(self._transport.tidy, limiter=self._threads)
        finally:
            self._tasks = None
            for wires in self._idle.values():
                for wire in wires:
                    wire.close()

    def sampled(self, tokens: StepTokens) -> None:
        """A step has brought tokens."""
        self._rooms.sampled(tokens)

    def saved(self) -> None:
        """Pages may have come to host memory."""
        self._rooms.look()

    def arrived(self, sequence: Sequence) -> None:
        """A sequence has joined the queue."""
        transfer = sequence.request.transfer
        if transfer is None and self._fakes_all:
            self._make_up(sequence)
        if transfer is None or self._tasks is None:
            return
        if self._is_fake and transfer.source:
            self._make_up(sequence)
            return
        if not transfer.source:
            self._rooms.open(transfer.room, sequence, self._connector, self._pages)
            return
        wanted = self._connector.wanted(sequence, has_next=takes_first(sequence))
        if len(wanted.passed) + len(wanted.keys) < self._least_pages:
            return
        self._scheduler.roster.waiting.suspend(sequence)
        self._tasks.start_soon(self._fetch, sequence, transfer.source, transfer.room, wanted)

    def _make_up(self, sequence: Sequence) -> None:
        """Takes pages of zeros as those of the prompt."""
        wanted = self._connector.wanted(sequence)
        reserved = self._connector.reserve(len(wanted.keys))
        for host in reserved.hosts:
            for view in self._pages.views([host]):
                view[:] = bytes(len(view))
            if self._pages.needs_copies:
                self._pages.copy([host])
        self._connector.adopt(sequence, wanted.first, reserved, len(reserved.hosts))

    async def _fetch(self, sequence: Sequence, source: str, room: int, wanted: Wanted) -> None:
        begin, first = monotonic(), wanted.first
        self.received.fetches += 1
        num_there = len(wanted.passed)
        keys = b"".join([*wanted.passed, *wanted.keys])
        transport = TCP if self._transport is None else self._transport.name
        wants_first = takes_first(sequence)
        ask = Ask(room, self._identity, first - num_there, keys, num_there, transport, wants_first)
        try:
            incoming = await self._ask(source, ask)
            try:
                end = first + len(wanted.keys)
                prompt = PromptPages(incoming, self._connector, sequence, end, self._take_first)
                while count := await prompt.receive(first):
                    first += count
                    self.received.pages += count
                    self.received.bytes += count * incoming.layout.page_bytes
            except BaseException:
                incoming.wire.close()
                raise
            finally:
                incoming.close()
            self._keep(source, incoming.wire)
            if first < wanted.first + len(wanted.keys) and not sequence.is_finished:
                raise LinkError(f"it has {first - wanted.first} of {len(wanted.keys)} pages")
        except (LinkError, OSError) as error:
            if not sequence.is_finished:
                self.received.failures += 1
                self._log(source, error)
        finally:
            self.received.wait_s += monotonic() - begin
            self._scheduler.roster.waiting.release(sequence)
            self._wake()

    async def _ask(self, source: str, ask: Ask) -> Incoming:
        """Asks over a connection that is open, or else a new one. Raises LinkError."""
        wire, answer = await self._send(source, ask)
        try:
            match answer:
                case Found(layout=layout, memory=memory):
                    if (reason := mismatch(layout, self._pages.layout)) is not None:
                        raise LinkError(reason)
                    remote = None if memory is None else await self._open(wire, memory, layout)
                    return Incoming(wire, layout, self._pages, remote, self._threads)
                case Refused(reason=reason):
                    raise LinkError(reason)
                case _:
                    raise LinkError(f"a {type(answer).__name__} came where a layout was due")
        except BaseException:
            wire.close()
            raise

    async def _open(self, wire: Wire, memory: Memory, layout: PageLayout) -> Remote:
        """What reads the memory of the other server."""
        places = Places(memory, layout)
        if self._transport is None or bool(memory.name) != bool(self._transport.server_name):
            raise LinkError("it offers memory by another transport than was asked for")
        fds = [] if memory.name else await wire.receive_files(places.count)
        return Remote(self._transport.open(memory, fds), places)

    async def _send(self, source: str, ask: Ask) -> tuple[Wire, ToDecode]:
        """-> the connection, and what came first of all that is no notice"""
        while self._idle[source]:
            wire = self._idle[source].pop()
            try:
                return wire, await _first_answer(wire, ask)
            except LinkError as error:  # it has ended since
                LOG.debug("a connection has ended", source=source, reason=str(error))
        wire = await self._connect(source)
        return wire, await _first_answer(wire, ask)

    async def _connect(self, source: str) -> Wire:
        """A new connection: over this machine alone where the transport can, and the other server as well.
        Raises LinkError."""
        address = parse_source(source)
        assert address is not None, "checked with the header"
        host, port = address
        name = b"" if self._transport is None else self._transport.local_name(port)
        if name:
            is_local = await to_thread.run_sync(is_of_this_machine, host, limiter=self._threads)
            wire = await connect_local(name, self._key, self._threads) if is_local else None
            if wire is not None:
                return wire
        return await connect(host, port, self._key, self._threads)

    def _take_first(self, sequence: Sequence, first: First, end: int) -> None:
        """Takes in the first token; `end`: page of the sequence behind the last one that comes. Raises
        LinkError."""
        if has_left(sequence):
            return
        if not takes_first(sequence) or not 0 <= first.token_id < self._vocab_size:
            raise LinkError(f"token {first.token_id} came as the first one")
        logprob = None
        if sequence.request.params.logprobs:
            logprob = TokenLogprob(first.token_id, first.logprob, first.top, first.picked)
        cached_len = end * self._scheduler.config.page_size
        take_first(self._scheduler, sequence, first.token_id, cached_len, logprob)
        self._wake()

    def _keep(self, source: str, wire: Wire) -> None:
        if len(self._idle[source]) < IDLE_WIRES:
            self._idle[source].append(wire)
        else:
            wire.close()

    def _log(self, source: str, error: Exception) -> None:
        now = monotonic()
        if now - self._logged_s.get(source, -LOG_AGAIN_S) >= LOG_AGAIN_S:
            self._logged_s = {name: at for name, at in self._logged_s.items() if now - at < LOG_AGAIN_S}
            self._logged_s[source] = now
            LOG.warning(
                "pages did not come, and their prompt is computed here; not logged again for a minute",
                source=source,
                reason=str(error),
            )


async def _first_answer(wire: Wire, ask: Ask) -> ToDecode:
    """Asks. Closes the connection if that fails. Raises LinkError."""
    try:
        await wire.send(ask)
        while isinstance(answer := await wire.receive(ANSWERS), Waiting):
            pass
    except BaseException:
        wire.close()
        raise
    return answer
