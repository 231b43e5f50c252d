"""Records in Mooncake Store: a double of its client, and the client itself before a master where they are
installed."""

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from runtime.errors import StartError
from runtime.json_value import JsonValue
from runtime.storage.backend import BackendConfig
from runtime.storage.mooncake import MooncakeBackend
from runtime.storage.record import HEADER_BYTES
from runtime.storage.settings import problem
from runtime.storage.store import open_store
from tests.storage.mooncake_double import MASTERS, MooncakeDistributedStore

KEYS = [bytes([number]) * 16 for number in range(4)]
SIZE = 4096
MASTER = "127.0.0.1:50051"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """-> the address of a master"""
    module = ModuleType("mooncake.store")
    module.__dict__["MooncakeDistributedStore"] = MooncakeDistributedStore
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    MASTERS[MASTER] = {}
    yield MASTER
    MASTERS.clear()


def open_backend(master: str, identity: bytes = b"i" * 16) -> MooncakeBackend:
    settings: dict[str, JsonValue] = {"master_server_address": master, "global_segment_size": 64 << 20}
    settings["local_hostname"] = "127.0.0.1"
    return MooncakeBackend(BackendConfig(record_bytes=SIZE, identity=identity, settings=settings))


def parts(seed: int = 0) -> list[memoryview]:
    data = bytearray((seed + index) % 251 for index in range(SIZE))
    return [memoryview(data)[:100], memoryview(data)[100:1000], memoryview(data)[1000:]]


def check(master: str) -> None:
    """What a backend must do, of two clients."""
    backend, other = open_backend(master), open_backend(master, b"o" * 16)
    second = open_backend(master)
    assert backend.contains(KEYS) == 0
    for key in KEYS[:2]:
        backend.write(key, parts(key[0]))
    assert backend.contains(KEYS) == 2 and backend.contains(KEYS[1:]) == 1 and other.contains(KEYS) == 0
    buffers = [memoryview(bytearray(len(part))) for part in parts()]
    assert second.read(KEYS[1], buffers) and buffers == parts(1)
    backend.write(KEYS[1], parts(7))  # it is there, and stays
    assert second.read(KEYS[1], buffers) and buffers == parts(1)
    assert not backend.read(KEYS[2], buffers)
    backend.remove(KEYS[0])
    assert backend.contains(KEYS) == 0
    other.write(KEYS[0], parts())
    assert backend.clear() == 1 and other.contains(KEYS) == 1
    assert backend.stats() == {}
    for one in (backend, second, other):
        one.close()


def test_records(double: str) -> None:
    check(double)


def test_pages_through_the_store(double: str) -> None:
    store = open_store("mooncake", {"master_server_address": double}, b"i" * 16, SIZE)
    store.save(KEYS[0], parts())
    buffers = [memoryview(bytearray(len(part))) for part in parts()]
    assert store.count(KEYS) == 1 and store.load(KEYS[0], buffers) and buffers == parts()
    name, record = next(iter(MASTERS[double].items()))
    MASTERS[double][name] = record[:HEADER_BYTES] + b"x" + record[HEADER_BYTES + 1 :]
    assert not store.load(KEYS[0], buffers) and store.totals.pages_corrupt == 1 and not MASTERS[double]
    MASTERS[double][name] = record[:-1]
    assert not store.load(KEYS[0], buffers)
    store.close()


def test_failures_are_errors(double: str) -> None:
    backend = open_backend(double)
    buffers = [memoryview(bytearray(len(part))) for part in parts()]
    assert isinstance(backend._store, MooncakeDistributedStore)
    backend._store.fails = True
    for call in (
        lambda: backend.write(KEYS[0], parts()),
        lambda: backend.read(KEYS[0], buffers),
        backend.clear,
    ):
        with pytest.raises(OSError, match="Mooncake could not"):
            call()


def test_no_master_and_no_package_are_refused(double: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match="no store at 127.0.0.1:1 .*mooncake_master"):
        open_backend("127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StartError, match="pip install mooncake-transfer-engine"):
        open_backend(double)


def test_settings_are_checked() -> None:
    assert problem("mooncake", {"master_server_address": "a:1", "prefetch_threshold": 1}) is None
    assert "master_server_address" in str(problem("mooncake", {}))
    assert "max_bytes" in str(problem("mooncake", {"master_server_address": "a:1", "max_bytes": 1}))


def test_library(tmp_path: Path) -> None:
    """Where it is installed, with a master of its own."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake is not installed")
    ports: list[int] = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports.append(listener.getsockname()[1])
    options = [f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"]
    command, quiet = [sys.executable, "-m", "mooncake.cli", *options], subprocess.DEVNULL
    with subprocess.Popen(command, cwd=tmp_path, stdout=quiet, stderr=quiet) as process:
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                try:
                    socket.create_connection(("127.0.0.1", ports[0]), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            check(f"127.0.0.1:{ports[0]}")
        finally:
            process.kill()
