"""How servers read one another's host memory (--disaggregation-transfer-backend). With tcp, they do not:
bytes are sent.

    shm               descriptors of the memory are passed over a socket of this machine
    mooncake, nixl    a library reads by addresses, over RDMA where there is some
"""

import socket
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from runtime.errors import LinkError
from runtime.messages.transfer import Memory
from runtime.transfer.layout import RankPages
from runtime.transfer.mapped import Mappings, seal
from runtime.transfer.reading import Piece, Reading, address_of

TCP, SHM, FAKE = "tcp", "shm", "fake"
TIDY_S = 5.0


class Engine(Protocol):
    """A library that reads the memory of other servers, which have registered it. Thread-safe."""

    @property
    def name(self) -> bytes:
        """By which the engine of another server finds this one."""
        ...

    def register(self, address: int, size: int) -> None:
        """Others may read this memory, and reads may write to it. Raises LinkError."""
        ...

    def unregister(self, address: int, size: int) -> None:
        """Ends `register`."""
        ...

    def read(self, server: bytes, spans: Sequence["Span"]) -> None:
        """Reads memory of a server, waiting for all of it. Raises LinkError."""
        ...

    def close(self) -> None:
        """Releases what it holds. Nothing is called afterwards."""
        ...


class Span(NamedTuple):
    """Bytes that an engine reads."""

    local: int  # address
    remote: int  # address
    size: int


class Transport(Protocol):
    """A way to read the host memory of other servers, and to let them read."""

    name: str

    @property
    def server_name(self) -> bytes:
        """Memory.name: empty where descriptors are passed."""
        ...

    def local_name(self, port: int) -> bytes:
        """The abstract name of a socket for servers of this machine, beside a port; empty: there is none."""
        ...

    def add(self, pages: RankPages) -> None:
        """Host memory of a replica, which is read and written. Raises LinkError."""
        ...

    def open(self, memory: Memory, fds: Sequence[int]) -> Reading:
        """Reads the memory of another server; `fds`: of it, where they were passed."""
        ...

    def tidy(self) -> None:
        """Releases what was kept for reads that do not come. Called every TIDY_S."""
        ...

    def close(self) -> None:
        """Ends everything."""
        ...


class SharedMemory:
    """Servers on one machine."""

    name = SHM

    def __init__(self) -> None:
        self._mappings = Mappings()

    @property
    def server_name(self) -> bytes:
        """See Transport.server_name."""
        return b""

    def local_name(self, port: int) -> bytes:
        """See Transport.local_name."""
        return shared_name(port)

    def add(self, pages: RankPages) -> None:
        """See Transport.add."""
        seal(pages.fds)

    def open(self, memory: Memory, fds: Sequence[int]) -> Reading:
        """See Transport.open."""
        return self._mappings.open(fds)

    def tidy(self) -> None:
        """See Transport.tidy."""
        self._mappings.forget()

    def close(self) -> None:
        """See Transport.close."""


class EngineTransport:
    """Servers that an engine connects."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self._engine = engine

    @property
    def server_name(self) -> bytes:
        """See Transport.server_name: what others must know, which changes with what is registered."""
        return self._engine.name

    def local_name(self, port: int) -> bytes:
        """See Transport.local_name."""
        return b""

    def add(self, pages: RankPages) -> None:
        """See Transport.add."""
        for memory in pages.memories:
            self._engine.register(memory.address, memory.num_bytes)

    def open(self, memory: Memory, fds: Sequence[int]) -> Reading:
        """See Transport.open."""
        return EngineReading(self._engine, memory)

    def tidy(self) -> None:
        """See Transport.tidy: engines keep nothing."""

    def close(self) -> None:
        """See Transport.close."""
        self._engine.close()


class EngineReading:
    """Reads the memory of one server by an engine."""

    def __init__(self, engine: Engine, memory: Memory) -> None:
        self._engine = engine
        self._server = memory.name
        self._addresses = [one.address for one in (*memory.ranks, *memory.states)]

    def read(self, pieces: Sequence[Piece]) -> None:
        """See Reading.read."""
        spans = [
            Span(address_of(target), self._addresses[source] + offset, len(target))
            for source, offset, target in pieces
        ]
        self._engine.read(self._server, spans)

    def register(self, buffer: memoryview) -> None:
        """See Reading.register."""
        self._engine.register(address_of(buffer), len(buffer))

    def unregister(self, buffer: memoryview) -> None:
        """See Reading.unregister."""
        self._engine.unregister(address_of(buffer), len(buffer))

    def close(self) -> None:
        """See Reading.close."""


def shared_name(port: int) -> bytes:
    """The abstract name of the socket beside a bootstrap port."""
    return b"\0runtime-pages-%d" % port


def is_of_this_machine(host: str) -> bool:
    """Whether an address or name leads to this machine: a socket can be bound to no other one. For worker
    threads: names are resolved."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except (OSError, UnicodeError):
        return False
    return True


def describe(error: Exception) -> LinkError:
    """What an engine raised."""
    return LinkError(f"its memory can't be read ({type(error).__name__}: {error})")
