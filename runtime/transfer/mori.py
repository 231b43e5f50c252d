"""MORI-IO, AMD's library that reads the memory of other servers over RDMA, as Engine (transports.py).

Written by the bindings of ROCm/mori (src/pybind/pybind_io.cpp, commit 624002c8; the package amd-mori). Its
module `mori.io` imports torch, so the classes below it are called, those of `mori.cpp`.
"""

import ctypes
import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import msgspec

from runtime.errors import LinkError
from runtime.transfer.transports import Span

READ_S = 60.0  # for one read
POLL_S = 0.0002
MAX_SERVERS = 256  # that an engine remembers
NO_DEVICE = -1  # of host memory

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class EngineDesc(Protocol):
    """Where an engine is."""

    def pack(self) -> bytes:
        """For `unpack` of its class."""
        ...


class MemoryDesc(Protocol):
    """Memory that an engine has registered."""

    id: int
    data: int  # its address
    size: int

    def pack(self) -> bytes:
        """For `unpack` of its class."""
        ...


class TransferStatus(Protocol):
    """What becomes of a read."""

    def InProgress(self) -> bool:
        """It goes on."""
        ...

    def Succeeded(self) -> bool:
        """All has come."""
        ...

    def Message(self) -> str:
        """Why it failed."""
        ...


class Session(Protocol):
    """Reads from one memory to another one."""

    def AllocateTransferUniqueId(self) -> int:
        """The id of a read."""
        ...

    def BatchRead(
        self, own: list[int], other: list[int], sizes: list[int], status: TransferStatus, id: int
    ) -> None:
        """Begins to read; `own` and `other` are offsets in both memories."""
        ...


class IOEngine(Protocol):
    """The methods of `mori.cpp.IOEngine` that are used here."""

    def GetEngineDesc(self) -> EngineDesc:
        """Where it is."""
        ...

    def RegisterRemoteEngine(self, engine: EngineDesc) -> None:
        """Remembers another engine."""
        ...

    def DeregisterRemoteEngine(self, engine: EngineDesc) -> None:
        """Forgets it."""
        ...

    def RegisterMemory(self, data: object, size: int, device: int, place: object) -> MemoryDesc:
        """Lets others read and write."""
        ...

    def DeregisterMemory(self, memory: MemoryDesc) -> None:
        """Ends it."""
        ...

    def CreateSession(self, own: MemoryDesc, other: MemoryDesc) -> Session | None:
        """None: nothing connects the two."""
        ...


class Places(Protocol):
    """`mori.cpp.MemoryLocationType`."""

    CPU: object


class Library(Protocol):
    """What is used of the module `mori.cpp` while an engine runs."""

    MemoryLocationType: Places

    def TransferStatus(self) -> TransferStatus:
        """A new one."""
        ...


class Server(NamedTuple):
    """Another server's engine, and its memory."""

    engine: EngineDesc
    memory: list[MemoryDesc]


class Name(msgspec.Struct, frozen=True, array_like=True):
    """What others must know of an engine."""

    engine: bytes
    memory: list[bytes]


class Servers(Protocol):
    """Reads names."""

    def __call__(self, name: bytes, /) -> Server:
        """Raises an error of any kind for what is none."""
        ...


class MoriEngine:
    """An engine of MORI-IO. Its calls are made one at a time; reads run beside each other."""

    def __init__(self, library: Library, engine: IOEngine, server_of: Servers) -> None:
        self._library, self._engine, self._server_of = library, engine, server_of
        self._lock = threading.Lock()
        self._own: dict[int, MemoryDesc] = {}  # by address
        self._servers: OrderedDict[bytes, Server] = OrderedDict()  # by name
        self._sessions: dict[tuple[bytes, int, int], Session] = {}  # by server, and both memories

    @property
    def name(self) -> bytes:
        """Its description and that of its memory, which changes with what is registered."""
        with self._lock:
            memory = [desc.pack() for desc in self._own.values()]
            return msgspec.msgpack.encode(Name(self._engine.GetEngineDesc().pack(), memory))

    def register(self, address: int, size: int) -> None:
        """See Engine.register."""
        place = self._library.MemoryLocationType.CPU
        with self._lock:
            try:
                data = _capsule(address, None, None)
                self._own[address] = self._engine.RegisterMemory(data, size, NO_DEVICE, place)
            except Exception as error:  # the library's own classes
                raise LinkError(f"MORI can't register {size} bytes of memory ({error})") from None

    def unregister(self, address: int, size: int) -> None:
        """See Engine.unregister."""
        with self._lock:
            memory = self._own.pop(address)
            self._forget(lambda key: key[1] == memory.id)
            self._engine.DeregisterMemory(memory)

    def read(self, server: bytes, spans: Sequence[Span]) -> None:
        """See Engine.read."""
        try:
            with self._lock:
                reads = [self._begin(server, *group) for group in self._groups(server, spans)]
            deadline = time.monotonic() + READ_S
            while any(status.InProgress() for status in reads) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        except LinkError:
            raise
        except Exception as error:  # the library's own classes
            raise LinkError(f"MORI could not read its memory ({type(error).__name__}: {error})") from None
        for status in reads:
            if not status.Succeeded():
                raise LinkError(f"MORI could not read its memory within {READ_S:g} s ({status.Message()})")

    def close(self) -> None:
        """See Engine.close: the engine ends with its last reference."""
        for address in list(self._own):
            self.unregister(address, 0)

    def _groups(self, name: bytes, spans: Sequence[Span]) -> list[tuple[MemoryDesc, MemoryDesc, list[Span]]]:
        """The spans of each two memories. Raises LinkError for a span that lies in none."""
        groups: dict[tuple[int, int], tuple[MemoryDesc, MemoryDesc, list[Span]]] = {}
        own, other = list(self._own.values()), self._server(name).memory
        for span in spans:
            here, there = _around(own, span.local, span.size), _around(other, span.remote, span.size)
            groups.setdefault((here.id, there.id), (here, there, []))[2].append(span)
        return list(groups.values())

    def _begin(self, name: bytes, own: MemoryDesc, other: MemoryDesc, spans: list[Span]) -> TransferStatus:
        key = name, own.id, other.id
        if key not in self._sessions:
            opened = self._engine.CreateSession(own, other)
            if opened is None:
                raise LinkError("MORI has no way to its memory")
            self._sessions[key] = opened
        session, status = self._sessions[key], self._library.TransferStatus()
        session.BatchRead(
            [span.local - own.data for span in spans],
            [span.remote - other.data for span in spans],
            [span.size for span in spans],
            status,
            session.AllocateTransferUniqueId(),
        )
        return status

    def _server(self, name: bytes) -> Server:
        if name not in self._servers:
            self._servers[name] = found = self._server_of(name)
            self._engine.RegisterRemoteEngine(found.engine)
            if len(self._servers) > MAX_SERVERS:
                oldest, gone = self._servers.popitem(last=False)
                self._forget(lambda key: key[0] == oldest)
                if all(other.engine.pack() != gone.engine.pack() for other in self._servers.values()):
                    self._engine.DeregisterRemoteEngine(gone.engine)
        self._servers.move_to_end(name)
        return self._servers[name]

    def _forget(self, is_gone: "SessionFilter") -> None:
        self._sessions = {key: session for key, session in self._sessions.items() if not is_gone(key)}


class SessionFilter(Protocol):
    """Chooses sessions."""

    def __call__(self, key: tuple[bytes, int, int], /) -> bool:
        """Whether it is one of them."""
        ...


def _around(memory: Sequence[MemoryDesc], address: int, size: int) -> MemoryDesc:
    for desc in memory:
        if desc.data <= address and address + size <= desc.data + desc.size:
            return desc
    raise LinkError(f"{size} bytes lie in no memory that was registered")


def engine_key() -> str:
    """A name that no other engine has."""
    return f"runtime-{secrets.token_hex(8)}"


@contextmanager
def without_torch() -> Iterator[None]:
    """`mori.cpp` imports torch where it can, which a process without ranks must not."""
    is_there = "torch" in sys.modules
    if not is_there:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not is_there:
            del sys.modules["torch"]
