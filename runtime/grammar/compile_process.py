"""The compile process: `python -m runtime.grammar.compile_process`, started by actors/grammars.py when the
first grammar comes.

It decides whether a grammar can be compiled over the model's vocabulary, before a rank gets it. A schema of a
few bytes can keep a library busy for minutes, use up all memory or end its process, and a thread cannot be
saved from any of these. So each grammar is compiled in a child of this process, which is forked with the
library loaded (milliseconds), has bounds on its time and memory, and may die.

It imports torch where the library does, has one thread, and ends when its parent closes the socket.
"""

import argparse
import ctypes
import faulthandler
import os
import resource
import selectors
import signal
import socket
from pathlib import Path
from time import monotonic
from typing import NoReturn

import msgspec
from msgspec import Struct

from runtime import log
from runtime.grammar.backend import GrammarError
from runtime.grammar.framing import Frames, framed
from runtime.grammar.open_backend import WithOthers, open_backend
from runtime.grammar.trial import try_grammar
from runtime.messages.constraint import Grammar, GrammarSetup

MEMORY_BYTES = 1 << 30  # memory that a child may take beyond what it has when it is forked
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class CompileRequest(Struct, frozen=True, array_like=True):
    """A request to compile a grammar within `limit_s`."""

    id: int
    grammar: Grammar
    limit_s: float


class CompileResult(Struct, frozen=True, array_like=True):
    """Success (`error` is empty), or what is wrong with the grammar. `is_fault`: the error is the server's,
    not the grammar's."""

    id: int
    error: str
    is_fault: bool = False


class _Child(Struct, frozen=True):
    """A child process that compiles a grammar."""

    id: int
    pid: int
    pipe: int
    deadline_s: float
    limit_s: float


class CompileServer:
    """Starts a child for each request and passes on its result."""

    def __init__(self, backend: WithOthers, setup: GrammarSetup, connection: socket.socket) -> None:
        self._backend = backend
        self._setup = setup
        self._socket = connection
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(CompileRequest)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}  # by pipe

    def run(self) -> None:
        """Serves requests until the parent closes the socket."""
        while True:
            next_s = min((child.deadline_s for child in self._children.values()), default=None)
            for key, _ in self._selector.select(None if next_s is None else max(next_s - monotonic(), 0)):
                if key.fileobj is not self._socket:
                    self._end(self._children[key.fd])
                elif not self._listen():
                    return self._kill_all()
            for child in [c for c in self._children.values() if c.deadline_s <= monotonic()]:
                os.kill(child.pid, signal.SIGKILL)
                self._end(
                    child,
                    f"the grammar was not compiled and tried in {child.limit_s:g} s (--grammar-timeout); "
                    "make it simpler: in JSON "
                    "Schema above all its maxLength, maxItems and patterns",
                )

    def _listen(self) -> bool:
        data = self._socket.recv(1 << 16)
        for frame in self._frames.feed(data):
            self._start(self._decoder.decode(frame))
        return bool(data)

    def _start(self, request: CompileRequest) -> None:
        self._backend.load(request.grammar)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._socket.close()  # else the server would not see the end of a process that is killed
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _compile(self._backend, self._setup, request, writing)
        os.close(writing)
        self._children[reading] = _Child(
            request.id, pid, reading, monotonic() + request.limit_s, request.limit_s
        )
        self._selector.register(reading, selectors.EVENT_READ)

    def _end(self, child: _Child, error: str = "") -> None:
        """Passes on the child's result. A child writes a short result in one piece right before it ends."""
        self._selector.unregister(child.pipe)
        del self._children[child.pipe]
        result = b"" if error else os.read(child.pipe, 1 << 16)
        os.close(child.pipe)
        os.waitpid(child.pid, 0)
        if result:
            self._socket.sendall(framed(result))
            return
        error = (
            error
            or "the grammar took too much memory, or ended the process that compiled it; make it simpler"
        )
        self._socket.sendall(framed(msgspec.msgpack.encode(CompileResult(child.id, error))))

    def _kill_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)


def _compile(backend: WithOthers, setup: GrammarSetup, request: CompileRequest, writing: int) -> NoReturn:
    """The whole work of a child."""
    faulthandler.disable()  # the parent reports its death
    own_bytes = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own_bytes + MEMORY_BYTES, own_bytes + MEMORY_BYTES))
    seconds = int(request.limit_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        try_grammar(backend.compile(request.grammar).matcher(), setup.vocab_size, setup.eos_ids)
        result = CompileResult(request.id, "")
    except GrammarError as error:
        result = CompileResult(request.id, str(error)[:1000])
    except RecursionError:
        result = CompileResult(request.id, "the grammar is nested too deeply")
    except MemoryError:
        result = CompileResult(request.id, "the grammar takes too much memory; make it simpler")
    except Exception:
        log.write_stack()
        result = CompileResult(
            request.id, "the grammar could not be compiled; the server's log has the details", True
        )
    os.write(writing, msgspec.msgpack.encode(result))
    os._exit(0)


def main() -> None:
    """Runs the process."""
    parser = argparse.ArgumentParser(
        prog="runtime.grammar.compile_process",
        description="Compiles grammars; started by the runtime, not by hand.",
    )
    parser.add_argument("--socket", type=int, required=True, help="descriptor")
    parser.add_argument("--setup", required=True, help="JSON")
    arguments = parser.parse_args()
    setup = msgspec.json.decode(arguments.setup, type=GrammarSetup)
    backend = open_backend(setup, is_trial=True)
    with socket.socket(fileno=arguments.socket) as connection:
        CompileServer(backend, setup, connection).run()


if __name__ == "__main__":
    main()
