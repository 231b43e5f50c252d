"""Grammars that rank 0 has compiled: those used latest, bounded in number and in bytes."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from runtime.freed_memory import return_freed_memory
from runtime.grammar.backend import Backend, Compiled, GrammarError
from runtime.grammar.open_backend import WithOthers, open_backend
from runtime.messages.constraint import Grammar, GrammarSetup

KEPT = 128  # compiled grammars: of queued requests, too
KEPT_BYTES = 256 * 2**20  # of them, about


class CompiledGrammars:
    """Compiles in a thread, and keeps what it compiled. All use of the backend but the matchers is here."""

    def __init__(self, setup: GrammarSetup) -> None:
        self._setup = setup
        self._aside = ThreadPoolExecutor(1)
        self._backend: Future[WithOthers] | None = None
        self._kept: OrderedDict[Grammar, Future[Compiled | None]] = OrderedDict()  # the latest used last

    @property
    def backend(self) -> Backend:
        """The backend; waits for it."""
        return self._open().result()

    @property
    def num_bytes(self) -> int:
        """Bytes of the compiled grammars that are kept; those still being compiled count nothing."""
        return sum([_bytes_of(kept) for kept in self._kept.values()])

    def prepare(self, grammar: Grammar | None, done: Callable[[], None] = lambda: None) -> None:
        """Starts to open the backend and to compile, in another thread. `done` is called, in some thread,
        when that is over."""
        backend = self._open()
        if grammar is None:
            return done()
        if grammar not in self._kept:
            self._kept[grammar] = self._aside.submit(_compile, backend, grammar)
            # before a text is forced, and behind what is waited for
            self._aside.submit(_load_encoder, backend)
        self._kept.move_to_end(grammar)
        self._kept[grammar].add_done_callback(lambda _: done())
        self._drop()

    def find(self, grammar: Grammar) -> Compiled | None:
        """A compiled grammar; waits for it. None: it cannot be compiled."""
        self.prepare(grammar)
        compiled = self._kept[grammar].result()
        self._drop()
        return compiled

    def _open(self) -> Future[WithOthers]:
        if self._backend is None:
            self._backend = self._aside.submit(open_backend, self._setup)
        return self._backend

    def _drop(self) -> None:
        """Drops those that were not used for longest, but never the latest."""
        while len(self._kept) > 1 and (len(self._kept) > KEPT or self.num_bytes > KEPT_BYTES):
            self._kept.popitem(last=False)


def _bytes_of(kept: "Future[Compiled | None]") -> int:
    """Bytes of one compiled grammar; 0 while it is being compiled, and where it could not be."""
    if not kept.done() or kept.exception() is not None or (compiled := kept.result()) is None:
        return 0
    return compiled.num_bytes


def _load_encoder(backend: "Future[WithOthers]") -> None:
    """Has forced texts wait for no tokenizer."""
    if (encode := backend.result().encode) is not None:
        encode.load().result()
        return_freed_memory()


def _compile(backend: "Future[WithOthers]", grammar: Grammar) -> Compiled | None:
    """None: it cannot be compiled. The compile process has found it good, but a process with more in it may
    meet other limits."""
    try:
        return backend.result().compile(grammar)
    except GrammarError:
        return None
