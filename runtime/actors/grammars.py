"""The grammars of requests, seen from the event loop: each is checked in a compile process before its request
goes on.

The process (runtime/grammar/compile_process.py) is started by the first grammar, and stays. When it ends, the
next grammar starts another one. Results are cached. While a grammar is checked its request waits, and others
go on.
"""

import asyncio
import socket
import subprocess
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import anyio
import msgspec

from runtime import log
from runtime.actors import child_environment
from runtime.errors import InternalFault, InvalidRequest
from runtime.grammar.compile_process import CompileRequest, CompileResult
from runtime.grammar.framing import Frames, framed
from runtime.messages.constraint import Grammar, GrammarSetup

MAX_CONCURRENT = 4  # grammars that compile at the same time
MAX_CACHED = 1024  # results
START_S = 60.0  # for the process to load its library
ENDED = "the compile process ended"
ANSWER_S = 10.0  # beyond the time limit of a check, for a process that has answered before


class _Pending:
    """A check that is under way; several requests may wait for it."""

    def __init__(self) -> None:
        self.result: CompileResult | None = None
        self.done = anyio.Event()

    def settle(self, result: CompileResult) -> None:
        self.result = result
        self.done.set()


class Grammars:
    """Use it on one event loop; only `check` waits."""

    def __init__(
        self, setup: GrammarSetup, limit_s: float, prepare: Callable[[Grammar | None], Awaitable[None]]
    ) -> None:
        """`limit_s`: time limit of a check; `prepare` has the ranks compile a grammar, and returns when they
        have (None: load what compiles any, as the first one is being checked)."""
        self._prepare = prepare
        self._setup = setup
        self._limit_s = limit_s
        self._results: OrderedDict[Grammar, CompileResult] = OrderedDict()  # the latest used last
        self._pending: dict[Grammar, _Pending] = {}
        self._by_id: dict[int, _Pending] = {}
        self._limiter = anyio.CapacityLimiter(MAX_CONCURRENT)
        self._sending = anyio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._frames = Frames()
        self._has_answered = False  # whether the present process has answered a check
        self._last_id = 0

    async def check(self, grammar: Grammar) -> None:
        """Returns when `grammar` has been compiled, here and by the ranks, so that no step waits for it.
        Raises InvalidRequest when it cannot be compiled, InternalFault when the compile process fails."""
        if grammar.kind == "token_tree":  # it was checked when the server started
            return await self._prepare(grammar)
        while (result := self._results.get(grammar)) is None:
            if (pending := self._pending.get(grammar)) is None:
                await self._ask(grammar)
            else:
                await pending.done.wait()
                if pending.result is not None and pending.result.is_fault:
                    result = pending.result
                    break
        else:
            self._results.move_to_end(grammar)
        if result.is_fault:
            raise InternalFault(result.error)
        if result.error:
            raise InvalidRequest(f"constraint: {result.error}", param="constraint")
        await self._prepare(grammar)  # also where it is known: ranks forget, and new ranks know none

    async def _ask(self, grammar: Grammar) -> None:
        """Checks a grammar. Other requests with the same grammar wait for this check; if it is cancelled, one
        of them checks again."""
        pending = self._pending[grammar] = _Pending()
        try:
            async with self._limiter:
                # what ended the first process may not be this grammar
                result = await self._try(grammar) or await self._try(grammar)
            pending.settle(
                result
                or CompileResult(
                    0,
                    "the process that compiles grammars ended twice; the server's log has the details",
                    True,
                )
            )
        finally:
            del self._pending[grammar]
            pending.done.set()
        self._remember(grammar, pending.result)

    async def _try(self, grammar: Grammar) -> CompileResult | None:
        """One attempt. -> None when the process ended, or hung and was killed"""
        self._last_id += 1
        check = CompileRequest(self._last_id, grammar, self._limit_s)
        asked = self._by_id[check.id] = _Pending()
        try:
            await self._send(framed(msgspec.msgpack.encode(check)))
            with anyio.move_on_after(self._limit_s + (ANSWER_S if self._has_answered else START_S)):
                await asked.done.wait()
            if not asked.done.is_set():
                self._lost("the compile process did not answer")
            return asked.result
        finally:
            del self._by_id[check.id]

    def _remember(self, grammar: Grammar, result: CompileResult | None) -> None:
        assert result is not None
        if result.is_fault:
            raise InternalFault(result.error)
        self._results[grammar] = result
        if len(self._results) > MAX_CACHED:
            self._results.popitem(last=False)

    # ── the process ─────────────────────────────────────────────────────────────────────────────────────────

    async def _send(self, frame: bytes) -> None:
        """Sends a whole frame, even if its request is cancelled: other frames follow it."""
        with anyio.CancelScope(shield=True):
            async with self._sending:
                if self._socket is None:
                    self._start()
                    await self._prepare(None)
                assert self._socket is not None
                try:
                    await asyncio.get_running_loop().sock_sendall(self._socket, frame)
                except OSError:
                    self._lost(ENDED)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [
                "--socket",
                str(theirs.fileno()),
                "--setup",
                msgspec.json.encode(self._setup).decode(),
            ]
            self._process = child_environment.start_module(
                "runtime.grammar.compile_process",
                arguments,
                child_environment.environment(1),
                [theirs.fileno()],
            )
        ours.setblocking(False)
        self._socket, self._frames, self._has_answered = ours, Frames(), False
        asyncio.get_running_loop().add_reader(ours, self._on_data)
        log.get("grammars").info(
            "compile process started", backend=self._setup.backend, pid=self._process.pid
        )

    def _on_data(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._lost(ENDED)
        for frame in self._frames.feed(data):
            self._has_answered = True
            result = msgspec.msgpack.decode(frame, type=CompileResult)
            if (pending := self._by_id.get(result.id)) is not None:  # else its request was cancelled
                pending.settle(result)

    def _lost(self, why: str) -> None:
        self.stop()
        log.get("grammars").error(why)
        for asked in self._by_id.values():
            asked.done.set()

    def stop(self) -> None:
        """Ends the process, if there is one. The next check starts another."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
