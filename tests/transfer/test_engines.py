"""Libraries that read other servers' memory: doubles of each, and the library itself where there is one."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from runtime.errors import LinkError, StartError
from runtime.transfer import engines
from runtime.transfer.engines import ENGINES, Setup, check_backend, reachable
from runtime.transfer.transports import Engine, Span, address_of
from tests.transfer.engines import AGENTS, Double, nixl_agent
from tests.transfer.engines import ENGINES as DOUBLES

SETUP = Setup("127.0.0.1", "", "prefill", 0)
MODULES = {"mooncake": "mooncake.engine", "ascend": "memfabric_hybrid", "nixl": "nixl_cu13"}


def double(name: str) -> ModuleType:
    """The module that a library's double is in."""
    module = ModuleType(MODULES[name])
    module.__spec__ = ModuleSpec(MODULES[name], None)
    module.__dict__.update(TransferEngine=Double, nixl_agent=nixl_agent)
    return module


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Double, "calls", [])
    yield
    DOUBLES.clear()
    AGENTS.clear()


def check(reader: Engine, owner: Engine) -> None:
    """Reads two parts of the other's memory, and nothing where there is none."""
    theirs, own = memoryview(bytearray(os.urandom(1 << 16))), memoryview(bytearray(1 << 16))
    remote, local = address_of(theirs), address_of(own)
    owner.register(remote, len(theirs))
    reader.register(local, len(own))
    name = owner.name
    reader.read(name, [Span(local + 10, remote + 20, 100), Span(local + 200, remote, 10)])
    assert own[10:110] == theirs[20:120] and own[200:210] == theirs[:10] and own[:10] == bytes(10)
    with pytest.raises(LinkError):
        reader.read(name, [Span(local, remote + (1 << 40), 100)])
    reader.read(name, [Span(local, remote, 1 << 16)])
    assert own == theirs
    reader.unregister(local, len(own))
    owner.unregister(remote, len(theirs))


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("name", list(MODULES))
def test_doubles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name], double(name))
    monkeypatch.setenv(engines.STORE, "tcp://127.0.0.1:9")
    reader, owner = ENGINES[name](SETUP._replace(mode="decode")), ENGINES[name](SETUP)
    check(reader, owner)
    if name == "ascend":
        assert Double.calls[0][0] == "tcp://127.0.0.1:9" and Double.calls[0][2:] == ("Decode", 0)
    if name != "nixl":
        with pytest.raises(LinkError, match="status"):
            reader.read(b"127.0.0.1:1", [Span(1, 1, 1)])
    reader.close()
    owner.close()


@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_libraries(name: str) -> None:
    """Where they are installed: over tcp where there is no RDMA."""
    modules = engines.NIXL_BUILDS if name == "nixl" else ("mooncake",)
    if not any(importlib.util.find_spec(module) for module in modules):
        pytest.skip(f"{name} is not installed")
    check(ENGINES[name](SETUP._replace(mode="decode")), ENGINES[name](SETUP))


def test_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", None)
    with pytest.raises(StartError, match="ascend needs the package memfabric-hybrid"):
        check_backend("ascend", None)
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", double("ascend"))
    check_backend("ascend", None)
    check_backend("tcp", None)
    with pytest.raises(StartError, match="mooncake and mori, not for tcp"):
        check_backend("tcp", "mlx5_0")


@pytest.mark.parametrize("name", list(MODULES))
def test_a_missing_library_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "NIXL_BUILDS", ("nixl_cu13",))
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    with pytest.raises(StartError, match=f"{name} needs the package .*pip install"):
        ENGINES[name](SETUP)


@pytest.mark.usefixtures("clean")
def test_what_cannot_start_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("mooncake", "ascend"):
        monkeypatch.setitem(sys.modules, MODULES[name], double(name))
    monkeypatch.setattr(engines, "INFINIBAND", tmp_path / "none")
    with pytest.raises(StartError, match="no InfiniBand device"):
        ENGINES["mooncake"](SETUP._replace(devices="mlx5_0"))
    monkeypatch.delenv(engines.STORE, raising=False)
    with pytest.raises(StartError, match=engines.STORE):
        ENGINES["ascend"](SETUP)
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(engines, "INFINIBAND", tmp_path)
    ENGINES["mooncake"](SETUP._replace(devices="mlx5_0"))
    assert Double.calls[-1][2:] == ("rdma", "mlx5_0")
    monkeypatch.setattr(Double, "initialize", lambda *_: -1)
    for name in ("mooncake", "ascend"):
        monkeypatch.setenv(engines.STORE, "tcp://127.0.0.1:9")
        with pytest.raises(StartError, match="can't start"):
            ENGINES[name](SETUP)


def test_an_address_of_all_interfaces_is_one_of_them() -> None:
    assert reachable("10.1.2.3") == "10.1.2.3"
    assert reachable("0.0.0.0").count(".") == 3 and reachable("0.0.0.0") != "0.0.0.0"
