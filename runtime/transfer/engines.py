"""Libraries that read the memory of other servers, as Engine (transports.py).

    mooncake   mooncake-transfer-engine, `mooncake.engine.TransferEngine`; its documentation:
               docs/source/python-api-reference/transfer-engine.md of kvcache-ai/Mooncake
    nixl       nixl, `nixl_agent`; its documentation: the NVIDIA Inference Xfer Library's Python API
    ascend     memfabric-hybrid, `memfabric_hybrid.TransferEngine`, on NPUs
    mori       amd-mori, `mori.cpp.IOEngine` (mori.py)

mooncake and ascend have the same methods, but for how they begin. Each is imported where it is asked for.
"""

import importlib
import importlib.util
import os
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

import msgspec

from runtime.errors import LinkError, StartError
from runtime.storage.nixl_transfer import finish_transfer
from runtime.transfer.mori import MoriEngine, Name, Server, engine_key, without_torch
from runtime.transfer.transports import Engine, Span

OPTION = "--disaggregation-transfer-backend"
INFINIBAND = Path("/sys/class/infiniband")  # network devices with RDMA
MORI_DEVICES = "MORI_RDMA_DEVICES"  # names of network devices, as MORI reads them
STORE = "ASCEND_MF_STORE_URL"  # address of MemFabric's store, as its documentation names it
READ_S = 60.0  # for one read of nixl
NIXL_BUILDS = ("nixl_cu13", "nixl_cu12", "nixl_rocm")  # modules of the package, by the accelerator's library
MAX_SERVERS = 256  # that a nixl agent remembers


class Setup(NamedTuple):
    """What engines begin with."""

    host: str  # at which others reach this server; an address of all interfaces stands for one of them
    devices: str  # names of network devices, separated by commas; empty: all
    mode: str  # prefill or decode
    device_id: int  # number of the first accelerator


class TransferEngine(Protocol):
    """The methods that mooncake's and memfabric's classes share. Results are 0, or others after an error."""

    def get_rpc_port(self) -> int:
        """Port that other engines connect to."""
        ...

    def register_memory(self, buffer_addr: int, capacity: int, /) -> int:
        """Lets others read and write the memory."""
        ...

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """Ends it."""
        ...

    def batch_transfer_sync_read(
        self, target: str, buffers: list[int], peer_buffers: list[int], lengths: list[int], /
    ) -> int:
        """Reads parts of another engine's memory."""
        ...


class BatchEngine:
    """mooncake's engine, or memfabric's."""

    def __init__(self, engine: TransferEngine, name: str) -> None:
        self.name = name.encode()
        self._engine = engine

    def register(self, address: int, size: int) -> None:
        """See Engine.register."""
        if status := self._engine.register_memory(address, size):
            raise LinkError(f"the transfer engine can't register {size} bytes of memory (status {status})")

    def unregister(self, address: int, size: int) -> None:
        """See Engine.unregister."""
        self._engine.unregister_memory(address)

    def read(self, server: bytes, spans: Sequence[Span]) -> None:
        """See Engine.read."""
        status = self._engine.batch_transfer_sync_read(
            server.decode(errors="replace"),
            [span.local for span in spans],
            [span.remote for span in spans],
            [span.size for span in spans],
        )
        if status:
            raise LinkError(f"the transfer engine could not read its memory (status {status})")

    def close(self) -> None:
        """See Engine.close: the engine ends with its last reference."""
        del self._engine


def open_mooncake(setup: Setup) -> Engine:
    """Raises StartError."""
    engine = _import("mooncake.engine", "mooncake-transfer-engine", "mooncake").TransferEngine()
    host = reachable(setup.host)
    protocol = "rdma" if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()) else "tcp"
    if setup.devices and protocol == "tcp":
        raise StartError(
            f"--disaggregation-ib-device {setup.devices}: this machine has no InfiniBand device; leave it out"
        )
    # P2PHANDSHAKE: engines tell each other what they have, and no metadata server is needed
    if status := engine.initialize(host, "P2PHANDSHAKE", protocol, setup.devices):
        raise StartError(f"{OPTION} mooncake: the engine can't start over {protocol} (status {status})")
    return BatchEngine(engine, f"{host}:{engine.get_rpc_port()}")


def open_ascend(setup: Setup, environment: Mapping[str, str] = os.environ) -> Engine:
    """Raises StartError."""
    engine = _import("memfabric_hybrid", "memfabric-hybrid", "ascend").TransferEngine()
    if not (store := environment.get(STORE)):
        raise StartError(
            f"{OPTION} ascend: set {STORE}=tcp://HOST:PORT, the same for all servers: where MemFabric has "
            "its store"
        )
    host = reachable(setup.host)
    name = f"{host}:{_free_port(host)}"
    if status := engine.initialize(store, name, setup.mode.capitalize(), setup.device_id):
        raise StartError(f"{OPTION} ascend: the engine can't start with the store at {store} ({status})")
    return BatchEngine(engine, name)


class NixlAgent(Protocol):
    """The methods of `nixl_agent` that are used here."""

    def register_memory(self, memory: list[tuple[int, int, int, str]], mem_type: str) -> object:
        """Lets others read and write; each: address, bytes, device, note."""
        ...

    def deregister_memory(self, descriptors: object) -> None:
        """Ends it."""
        ...

    def get_agent_metadata(self) -> bytes:
        """What other agents must know."""
        ...

    def add_remote_agent(self, metadata: bytes) -> str | bytes:
        """Remembers another agent. -> its name"""
        ...

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Forgets it."""
        ...

    def get_xfer_descs(self, memory: list[tuple[int, int, int]], mem_type: str) -> object:
        """Parts of memory; each: address, bytes, device."""
        ...

    def initialize_xfer(self, operation: str, local: object, remote: object, agent: str | bytes) -> object:
        """-> a handle"""
        ...

    def transfer(self, handle: object) -> str:
        """Begins. -> DONE, PROC or ERR"""
        ...

    def check_xfer_state(self, handle: object) -> str:
        """-> DONE, PROC or ERR"""
        ...

    def release_xfer_handle(self, handle: object) -> None:
        """Frees a handle; ends its transfer."""
        ...


class NixlEngine:
    """An agent of NIXL. Its calls are made one at a time; transfers run beside each other."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._registered: dict[int, object] = {}
        self._servers: OrderedDict[bytes, str | bytes] = OrderedDict()  # names, by metadata

    @property
    def name(self) -> bytes:
        """Its metadata, which changes with what is registered."""
        with self._lock:
            return self._agent.get_agent_metadata()

    def register(self, address: int, size: int) -> None:
        """See Engine.register."""
        with self._lock:
            try:
                self._registered[address] = self._agent.register_memory([(address, size, 0, "")], "DRAM")
            except Exception as error:  # the library's own classes
                raise LinkError(f"NIXL can't register {size} bytes of memory ({error})") from None

    def unregister(self, address: int, size: int) -> None:
        """See Engine.unregister."""
        with self._lock:
            self._agent.deregister_memory(self._registered.pop(address))

    def read(self, server: bytes, spans: Sequence[Span]) -> None:
        """See Engine.read."""
        try:
            state = self._read(server, spans)
        except Exception as error:  # the library's own classes
            raise LinkError(f"NIXL could not read its memory ({type(error).__name__}: {error})") from None
        if state != "DONE":
            raise LinkError(f"NIXL could not read its memory within {READ_S:g} s ({state})")

    def _read(self, server: bytes, spans: Sequence[Span]) -> str:
        agent = self._agent
        with self._lock:
            local = agent.get_xfer_descs([(span.local, span.size, 0) for span in spans], "DRAM")
            remote = agent.get_xfer_descs([(span.remote, span.size, 0) for span in spans], "DRAM")
            handle = agent.initialize_xfer("READ", local, remote, self._server(server))
            state = agent.transfer(handle)
        return finish_transfer(agent, self._lock, handle, state, READ_S)

    def _server(self, metadata: bytes) -> str | bytes:
        if metadata not in self._servers:
            self._servers[metadata] = self._agent.add_remote_agent(metadata)
            if len(self._servers) > MAX_SERVERS:
                self._agent.remove_remote_agent(self._servers.popitem(last=False)[1])
        self._servers.move_to_end(metadata)
        return self._servers[metadata]

    def close(self) -> None:
        """See Engine.close: the agent ends with its last reference."""
        for address in list(self._registered):
            self.unregister(address, 0)


def open_nixl(setup: Setup) -> Engine:
    """Raises StartError."""
    # `import nixl` would choose among these by importing torch, which this process must not
    builds = [name for name in NIXL_BUILDS if importlib.util.find_spec(name) is not None]
    module = _import(builds[0] if builds else NIXL_BUILDS[0], "nixl", "nixl")
    try:
        return NixlEngine(module.nixl_agent(f"runtime-{secrets.token_hex(8)}"))
    except Exception as error:  # the library's own classes
        raise StartError(f"{OPTION} nixl: the agent can't start ({type(error).__name__}: {error})") from None


def open_mori(setup: Setup, environment: MutableMapping[str, str] = os.environ) -> Engine:
    """Raises StartError."""
    with without_torch():
        module = _import("mori.cpp", "amd-mori", "mori")
    if not (INFINIBAND.is_dir() and any(INFINIBAND.iterdir())):
        raise StartError(
            f"{OPTION} mori reads by RDMA, and this machine has no InfiniBand device; take tcp, or shm on "
            "one machine"
        )
    if setup.devices:
        environment[MORI_DEVICES] = setup.devices

    def server_of(name: bytes) -> Server:
        read = msgspec.msgpack.decode(name, type=Name)
        memory = [module.MemoryDesc.unpack(packed) for packed in read.memory]
        return Server(module.EngineDesc.unpack(read.engine), memory)

    try:
        engine = module.IOEngine(engine_key(), module.IOEngineConfig(reachable(setup.host), 0))
        rdma = module.RdmaBackendConfig()
        rdma.enable_notification = False  # of the other side, which would keep each until it is asked for
        engine.CreateBackend(module.BackendType.RDMA, rdma)
    except Exception as error:  # the library's own classes
        raise StartError(f"{OPTION} mori: the engine can't start ({type(error).__name__}: {error})") from None
    return MoriEngine(module, engine, server_of)  # type: ignore[arg-type]  # a module is its members


ENGINES: dict[str, Callable[[Setup], Engine]] = {
    "mooncake": open_mooncake,
    "nixl": open_nixl,
    "mori": open_mori,
    "ascend": open_ascend,
}


# modules of each library, and the package that has them
PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "mooncake": (("mooncake",), "mooncake-transfer-engine"),
    "nixl": (NIXL_BUILDS, "nixl"),
    "mori": (("mori",), "amd-mori"),
    "ascend": (("memfabric_hybrid",), "memfabric-hybrid"),
}


def check_backend(backend: str, devices: str | None) -> None:
    """Raises StartError for a library that is missing, and for devices that it does not take."""
    if devices and backend not in ("mooncake", "mori"):
        raise StartError(
            f"--disaggregation-ib-device is for {OPTION} mooncake and mori, not for {backend}; leave it out"
        )
    names, package = PACKAGES.get(backend, ((), ""))
    if names and not any(_is_installed(name) for name in names):
        raise StartError(_missing(backend, package, "it is not installed"))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # its package is missing, or it has no specification
        return False


def _missing(backend: str, package: str, reason: str) -> str:
    return (
        f"{OPTION} {backend} needs the package {package}, which can't be imported ({reason}); install it "
        f"(pip install {package}), or take tcp, or shm on one machine"
    )


def reachable(host: str) -> str:
    """The address itself; of one that stands for all interfaces, that of the interface to the network."""
    if host not in ("0.0.0.0", "::", ""):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of documentation (RFC 5737): nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def _import(name: str, package: str, backend: str) -> ModuleType:
    """A module of a library. Raises StartError."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise StartError(_missing(backend, package, str(error))) from None
