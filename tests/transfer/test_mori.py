"""MORI-IO, by a double of the classes of `mori.cpp` (src/pybind/pybind_io.cpp of ROCm/mori): memory is
registered on both sides, engines know each other, and a read is over when it is asked for."""

import ctypes
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from runtime.errors import LinkError, StartError
from runtime.transfer import engines, mori
from runtime.transfer.engines import check_backend, open_mori
from runtime.transfer.transports import Span, address_of
from tests.transfer.test_engines import SETUP, check

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
ALL: dict[str, "IOEngine"] = {}


class Desc(SimpleNamespace):
    """EngineDesc or MemoryDesc."""

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @staticmethod
    def unpack(packed: bytes) -> "Desc":
        return Desc(**json.loads(packed))


class TransferStatus:
    """It goes on when it is asked for the first time."""

    def __init__(self) -> None:
        self.states = ["going on"]

    def InProgress(self) -> bool:
        return len(self.states) > 1 and self.states.pop(0) == "going on"

    def Succeeded(self) -> bool:
        return self.states == ["done"]

    def Message(self) -> str:
        return self.states[-1]


class Session:
    def __init__(self, engine: "IOEngine", own: Desc, other: Desc) -> None:
        self.engine, self.own, self.other = engine, own, other
        self.ids = set[int]()

    def AllocateTransferUniqueId(self) -> int:
        return len(self.ids)

    def BatchRead(
        self, own: list[int], other: list[int], sizes: list[int], status: TransferStatus, id: int
    ) -> None:
        assert id not in self.ids and self.own.id in self.engine.memory
        self.ids.add(id)
        self.engine.num_reads += 1
        theirs = ALL.get(self.other.key)
        if theirs is None or self.other.id not in theirs.memory:
            status.states.append("the other side is gone")
            return
        for begin, source, size in zip(own, other, sizes, strict=True):
            assert 0 <= begin <= self.own.size - size and 0 <= source <= self.other.size - size
            ctypes.memmove(self.own.data + begin, self.other.data + source, size)
        status.states.append("done")


class IOEngine:
    def __init__(self, key: str, config: SimpleNamespace) -> None:
        self.key, self.config = key, config
        self.memory: dict[int, Desc] = {}
        self.known: set[str] = set()
        self.rdma: Any = None
        self.num_reads = self.num_sessions = self.next = 0
        ALL[key] = self

    def GetEngineDesc(self) -> Desc:
        return Desc(key=self.key, host=self.config.host)

    def CreateBackend(self, kind: str, config: SimpleNamespace) -> None:
        assert kind == "rdma"
        self.rdma = config

    def RegisterRemoteEngine(self, desc: Desc) -> None:
        self.known.add(desc.key)

    def DeregisterRemoteEngine(self, desc: Desc) -> None:
        self.known.remove(desc.key)

    def RegisterMemory(self, data: object, size: int, device: int, place: str) -> Desc:
        assert (device, place) == (-1, "cpu")
        self.next += 1
        desc = Desc(key=self.key, id=self.next, data=_pointer(data, None), size=size)
        self.memory[desc.id] = desc
        return desc

    def DeregisterMemory(self, desc: Desc) -> None:
        del self.memory[desc.id]

    def CreateSession(self, own: Desc, other: Desc) -> Session | None:
        self.num_sessions += 1
        return Session(self, own, other) if other.key in self.known else None


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """`mori.cpp`, on a machine with a network device."""
    found = ModuleType("mori.cpp")
    found.__spec__ = ModuleSpec("mori.cpp", None)
    found.__dict__.update(
        IOEngine=IOEngine,
        IOEngineConfig=lambda host, port: SimpleNamespace(host=host, port=port),
        RdmaBackendConfig=lambda: SimpleNamespace(enable_notification=True),
        BackendType=SimpleNamespace(RDMA="rdma"),
        MemoryLocationType=SimpleNamespace(CPU="cpu"),
        EngineDesc=Desc,
        MemoryDesc=Desc,
        TransferStatus=TransferStatus,
    )
    monkeypatch.setitem(sys.modules, "mori.cpp", found)
    (tmp_path / "rdma0").mkdir()
    monkeypatch.setattr(engines, "INFINIBAND", tmp_path)
    ALL.clear()
    return found


def test_the_double() -> None:
    reader, owner = open_mori(SETUP._replace(mode="decode")), open_mori(SETUP)
    check(reader, owner)
    reader.close()
    owner.close()
    for engine in ALL.values():
        assert not engine.memory and engine.config.host == "127.0.0.1"
        assert not engine.rdma.enable_notification, "there is no taker of notifications"


def test_several_memories_and_sessions_that_are_kept() -> None:
    """One read for each two memories, and one session for all reads of them."""
    reader, owner = open_mori(SETUP), open_mori(SETUP)
    double = next(iter(ALL.values()))
    theirs = [memoryview(bytearray(os.urandom(64))) for _ in range(2)]
    own = memoryview(bytearray(128))
    for view in theirs:
        owner.register(address_of(view), 64)
    for _ in range(3):
        reader.register(address_of(own), 128)
        spans = [
            Span(address_of(own) + 16 * place, address_of(theirs[place % 2]) + 8 * place, 16)
            for place in range(6)
        ]
        reader.read(owner.name, spans[:4])
        reader.read(owner.name, spans[4:])
        for place in range(6):
            assert own[16 * place : 16 * place + 16] == theirs[place % 2][8 * place : 8 * place + 16]
        reader.unregister(address_of(own), 128)
    assert (double.num_reads, double.num_sessions) == (12, 6)


def test_servers_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mori, "MAX_SERVERS", 1)
    reader, first, second = open_mori(SETUP), open_mori(SETUP), open_mori(SETUP)
    double, *others = ALL.values()
    own, theirs = memoryview(bytearray(8)), memoryview(bytearray(8))
    reader.register(address_of(own), 8)
    span = Span(address_of(own), address_of(theirs), 8)
    for one in (first, second):
        one.register(address_of(theirs), 8)
        reader.read(one.name, [span])
    assert double.known == {others[1].key}, "the oldest is forgotten"
    name = second.name
    second.close()
    with pytest.raises(LinkError, match="the other side is gone"):
        reader.read(name, [span])
    with pytest.raises(LinkError, match="could not read its memory"):
        reader.read(b"no name", [span])
    monkeypatch.setattr(IOEngine, "CreateSession", lambda *_: None)
    with pytest.raises(LinkError, match="no way to its memory"):
        reader.read(first.name, [span])


def test_what_cannot_start_is_refused(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment: dict[str, str] = {}
    open_mori(SETUP._replace(devices="rdma0"), environment)
    assert environment == {"MORI_RDMA_DEVICES": "rdma0"}
    package = ModuleType("mori")
    package.__spec__ = ModuleSpec("mori", None)
    monkeypatch.setitem(sys.modules, "mori", package)
    check_backend("mori", "rdma0")
    module.__dict__["RdmaBackendConfig"] = None
    with pytest.raises(StartError, match="mori: the engine can't start"):
        open_mori(SETUP)
    monkeypatch.setattr(engines, "INFINIBAND", tmp_path / "none")
    with pytest.raises(StartError, match="no InfiniBand device; take tcp"):
        open_mori(SETUP)
    monkeypatch.setitem(sys.modules, "mori.cpp", None)
    with pytest.raises(StartError, match="mori needs the package amd-mori.*pip install amd-mori"):
        open_mori(SETUP)
    monkeypatch.setitem(sys.modules, "mori", None)
    with pytest.raises(StartError, match="mori needs the package amd-mori"):
        check_backend("mori", None)


def test_torch_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with mori.without_torch(), pytest.raises(ImportError):
        import torch
    assert "torch" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    with mori.without_torch():
        import torch  # noqa: F401
    assert "torch" in sys.modules
