"""The compile process: `python -m runtime.grammar.compile_process`, started by actors/grammars.py when the first
grammar comes.

It says whether a grammar can be compiled over the model's vocabulary, before a rank ever sees it. A schema of
a few bytes can keep a library busy for minutes, eat all memory or end its process, none of which a thread can
be saved from. So each grammar is compiled in a child of this process, which is forked with the library loaded
(milliseconds), has bounds on its time and memory, and may die.

It imports torch where the library does, has one thread, and ends when its parent closes the socket.
"""

import argparse
import faulthandler
import os
import resource
import selectors
import signal
import socket
import sys
import traceback
from time import monotonic
from typing import NoReturn

import msgspec
import numpy as np
from msgspec import Struct

from runtime.grammar.backend import Backend, GrammarError, Matcher, open_backend
from runtime.grammar.framing import Frames, framed
from runtime.messages.constraint import Grammar, GrammarSetup

MEMORY_BYTES = 1 << 30  # that a child may take beyond what it is born with


class Check(Struct, frozen=True, array_like=True):
    """Can this be compiled within `limit_s`?"""

    id: int
    grammar: Grammar
    limit_s: float


class Verdict(Struct, frozen=True, array_like=True):
    """It can (`error` is empty), or what is wrong with it. `is_fault`: with us, not with the grammar."""

    id: int
    error: str
    is_fault: bool = False


class _Child(Struct, frozen=True):
    """A grammar that is being compiled."""

    id: int
    pid: int
    pipe: int
    deadline_s: float
    limit_s: float


class Foreman:
    """Starts a child for each check and passes on what it says."""

    def __init__(self, backend: Backend, vocab_size: int, upwards: socket.socket) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._socket = upwards
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(Check)
        self._selector = selectors.DefaultSelector()
        self._selector.register(upwards, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}  # by pipe

    def run(self) -> None:
        """Until the other side closes the socket."""
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
                    f"the grammar was not compiled in {child.limit_s:g} s (--grammar-timeout); make it simpler: in JSON "
                    "Schema above all its maxLength, maxItems and patterns",
                )

    def _listen(self) -> bool:
        data = self._socket.recv(1 << 16)
        for frame in self._frames.feed(data):
            self._start(self._decoder.decode(frame))
        return bool(data)

    def _start(self, check: Check) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _compile(self._backend, self._vocab_size, check, writing)
        os.close(writing)
        self._children[reading] = _Child(check.id, pid, reading, monotonic() + check.limit_s, check.limit_s)
        self._selector.register(reading, selectors.EVENT_READ)

    def _end(self, child: _Child, error: str = "") -> None:
        """Passes its verdict on. A child says something short, in one piece, right before it ends."""
        self._selector.unregister(child.pipe)
        del self._children[child.pipe]
        said = b"" if error else os.read(child.pipe, 1 << 16)
        os.close(child.pipe)
        os.waitpid(child.pid, 0)
        if said:
            self._socket.sendall(framed(said))
            return
        error = (
            error
            or "the grammar took too much memory, or ended the process that compiled it; make it simpler"
        )
        self._socket.sendall(framed(msgspec.msgpack.encode(Verdict(child.id, error))))

    def _kill_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)


def _compile(backend: Backend, vocab_size: int, check: Check, writing: int) -> NoReturn:
    """The life of a child."""
    faulthandler.disable()  # how it dies is of no interest
    own_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own_bytes + MEMORY_BYTES, own_bytes + MEMORY_BYTES))
    seconds = int(check.limit_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # if nobody is left to kill it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _check_beginning(backend.compile(check.grammar).matcher(), vocab_size)
        verdict = Verdict(check.id, "")
    except GrammarError as error:
        verdict = Verdict(check.id, str(error)[:1000])
    except RecursionError:
        verdict = Verdict(check.id, "the grammar is nested too deeply")
    except MemoryError:
        verdict = Verdict(check.id, "the grammar takes too much memory; make it simpler")
    except Exception:
        traceback.print_exc(file=sys.stderr)
        verdict = Verdict(
            check.id, "the grammar could not be compiled; the server's log has the details", True
        )
    os.write(writing, msgspec.msgpack.encode(verdict))
    os._exit(0)


def _check_beginning(matcher: Matcher, vocab_size: int) -> None:
    """A rule that no text can follow (`{"$ref": "#"}`) compiles well. Raises GrammarError."""
    bits = np.zeros(-(-vocab_size // 32), np.int32)
    if not matcher.fill(bits) or not bits.any():
        raise GrammarError(
            "no text can follow this rule; look for parts that need themselves, and for parts that contradict each other"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="runtime.grammar.compile_process",
        description="Compiles grammars; started by the runtime, not by hand.",
    )
    parser.add_argument("--socket", type=int, required=True, help="descriptor")
    parser.add_argument("--setup", required=True, help="JSON")
    given = parser.parse_args()
    setup = msgspec.json.decode(given.setup, type=GrammarSetup)
    backend = open_backend(setup)
    with socket.socket(fileno=given.socket) as upwards:
        Foreman(backend, setup.vocab_size, upwards).run()


if __name__ == "__main__":
    main()
