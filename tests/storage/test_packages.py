"""Backends of stores whose packages CI lacks, on doubles of these (tests/storage/doubles)."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import runtime.storage.process
from runtime.errors import StartError
from runtime.json_value import JsonDict
from runtime.storage import nixl
from runtime.storage.backend import Backend, BackendConfig
from runtime.storage.buffers import PACKAGES, import_store
from runtime.storage.eic import EicBackend
from runtime.storage.hf3fs import open_hf3fs
from runtime.storage.nixl import open_nixl
from runtime.storage.process import ProcessBackend
from runtime.storage.settings import problem
from runtime.storage.store import OWN, open_store
from runtime.storage.torch_stores.aibrix import AibrixBackend
from runtime.storage.torch_stores.lmcache import LmcacheBackend
from runtime.storage.torch_stores.simm import SimmBackend

DOUBLES = Path(__file__).parent / "doubles"
ROOTS = ("eic", "hf3fs_fuse", "nixl_cu12", "simm", "aibrix_kvcache", "lmcache")
KEYS = [bytes([number]) * 16 for number in range(4)]
SIZE = 5000  # of no power of two, as records have a header
Open = Callable[[BackendConfig], Backend]


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The doubles are what is installed."""
    forget()
    monkeypatch.syspath_prepend(DOUBLES)
    monkeypatch.setenv("PYTHONPATH", str(DOUBLES))
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    yield
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ROOTS]:
        del sys.modules[name]


def parts(seed: int = 0) -> list[memoryview]:
    data = bytearray((seed + index) % 251 for index in range(SIZE))
    return [memoryview(data)[:100], memoryview(data)[100:1000], memoryview(data)[1000:]]


def empty() -> list[memoryview]:
    return [memoryview(bytearray(part.nbytes)) for part in parts()]


def config(settings: JsonDict, identity: bytes = b"i" * 16) -> BackendConfig:
    return BackendConfig(record_bytes=SIZE, identity=identity, settings=settings)


def settings_of(name: str, folder: Path) -> JsonDict:
    (folder / ".3fs").touch()
    found: dict[str, JsonDict] = {
        "hf3fs": {"dir": str(folder / "pages")},
        "nixl": {"dir": str(folder / "pages"), "params": {"a": "b"}},
        "eic": {"remote_url": "eic://here:1", "eic_instance_id": "x", "eic_namespace": "n"},
        "simm": {"manager_address": f"{folder.name}:30001"},
        "aibrix": {},
        "lmcache": {},
    }
    return found[name]


BACKENDS: dict[str, Open] = {
    "hf3fs": open_hf3fs,
    "nixl": open_nixl,
    "eic": EicBackend,
    "simm": SimmBackend,
    "aibrix": AibrixBackend,
    "lmcache": LmcacheBackend,
}
LISTING = ("hf3fs", "nixl", "lmcache")  # that can delete all records of an identity


@pytest.mark.parametrize("name", BACKENDS)
def test_records(name: str, tmp_path: Path) -> None:
    """What a backend must do, of two servers and of another identity."""
    settings, opens = settings_of(name, tmp_path), BACKENDS[name]
    backend, second, other = (opens(config(settings, one * 16)) for one in (b"i", b"i", b"o"))
    assert backend.contains([]) == 0 and backend.contains(KEYS) == 0
    for key in KEYS[:2]:
        backend.write(key, parts(key[0]))
    assert backend.contains(KEYS) == 2 and backend.contains(KEYS[1:]) == 1 and other.contains(KEYS) == 0
    buffers = empty()
    assert second.read(KEYS[1], buffers) and buffers == parts(1)
    backend.write(KEYS[1], parts(1))  # it is there
    assert second.read(KEYS[0], buffers) and buffers == parts(0)
    assert not backend.read(KEYS[2], buffers)
    backend.remove(KEYS[0])
    assert backend.contains(KEYS) == 0 and backend.contains(KEYS[1:]) == 1
    other.write(KEYS[0], parts())
    if name in LISTING:
        assert backend.clear() == 1 and other.contains(KEYS) == 1 and backend.contains(KEYS[1:]) == 0
    else:
        with pytest.raises(OSError, match="cannot list records"):
            backend.clear()
    backend.stats()
    for one in (backend, second, other):
        one.close()


@pytest.mark.parametrize("name", ["hf3fs", "nixl", "eic"])
def test_pages_through_the_store(name: str, tmp_path: Path) -> None:
    store = open_store(name, settings_of(name, tmp_path), b"i" * 16, SIZE)
    store.save(KEYS[0], parts())
    buffers = empty()
    assert store.count(KEYS) == 1 and store.load(KEYS[0], buffers) and buffers == parts()
    assert not store.load(KEYS[1], buffers) and store.totals.errors == 0
    store.close()


def fail(name: str, backend: Any) -> None:
    """Lets the next call of the library fail."""
    module = import_store(PACKAGES[name].modules[1 if name == "nixl" else 0], name)
    if name == "eic":
        backend._client.fails = True
    elif name == "hf3fs":
        module.ANSWERS.append(-5)
    elif name == "nixl":
        module.FAILING.append("ERR")
    elif name == "simm":
        module.FAILING.append(-7)
    else:
        module.FAILING.append("ERROR")


@pytest.mark.parametrize("name", ["hf3fs", "nixl", "eic", "simm", "aibrix"])
def test_failures_are_errors(name: str, tmp_path: Path) -> None:
    backend = BACKENDS[name](config(settings_of(name, tmp_path)))
    backend.write(KEYS[0], parts())
    fail(name, backend)
    with pytest.raises(OSError, match="could not read|could not move|Input/output"):
        backend.read(KEYS[0], empty())
    fail(name, backend)
    with pytest.raises(OSError, match="could not|Input/output|no room"):
        backend.write(KEYS[1], parts())
    if name != "eic":
        assert backend.read(KEYS[0], empty()) and backend.contains(KEYS[1:]) == 0
    if name == "aibrix":
        assert not import_store("aibrix_kvcache", "aibrix").HELD
    backend.close()


def test_a_ring_of_3fs_that_does_nothing_is_not_used_again(tmp_path: Path) -> None:
    backend = open_hf3fs(config(settings_of("hf3fs", tmp_path)))
    backend.write(KEYS[0], parts())
    import_store("hf3fs_fuse.io", "hf3fs").ANSWERS.append(-1)
    with pytest.raises(OSError, match="did nothing for 5 s"):
        backend.read(KEYS[0], empty())
    buffers = empty()
    assert backend.read(KEYS[0], buffers) and buffers == parts()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("runtime-")]
    backend.close()


def test_starts_that_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match="no service at there:1"):
        EicBackend(config({"remote_url": "eic://there:1", "eic_instance_id": "x"}))
    with pytest.raises(StartError, match="on no mounted 3FS"):
        open_hf3fs(config({"dir": "/pages"}))
    with pytest.raises(StartError, match="no plugin GDS, but UCX, POSIX"):
        open_nixl(config({"dir": str(tmp_path), "plugin": "GDS"}))
    with pytest.raises(StartError, match="there is no file /none; correct LMCACHE_CONFIG_FILE"):
        LmcacheBackend(config({"config_file": "/none"}))
    simm = import_store("simm.kv", "simm")
    monkeypatch.setattr(simm, "KNOWN", ())
    with pytest.raises(StartError, match="SiMM takes no cm_primary_node_ip a"):
        SimmBackend(config({"manager_address": "a:1"}))


def test_the_file_of_lmcache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("max_local_cpu_size: 5")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    backend = LmcacheBackend(config({}))
    engines = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngineBuilder.engines
    assert [engine.config.text for engine in engines.values()] == [file.read_text()]
    backend.close()
    assert not engines


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "mooncake"])
def test_a_missing_package_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in PACKAGES[name].modules:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(nixl.importlib.util, "find_spec", lambda name: None)
    flag = "--enable-lmcache" if name == "lmcache" else f"--hicache-storage-backend {name}"
    with pytest.raises(StartError, match=f"{flag} needs the module .*install it"):
        BACKENDS[name](config(settings_of(name, tmp_path)))


@pytest.mark.parametrize(
    ("name", "settings", "wrong"),
    [
        ("hf3fs", {}, "dir"),
        ("nixl", {"plugin": "OBJ"}, "plugin"),
        ("eic", {"remote_url": "eic://a:1"}, "eic_instance_id"),
        ("simm", {"manager_address": "a"}, "manager_address"),
        ("aibrix", {"environment": {"PATH": "x"}}, "environment"),
        ("lmcache", {"dir": "x"}, "config_file"),
    ],
)
def test_settings_are_checked(name: str, settings: JsonDict, wrong: str, tmp_path: Path) -> None:
    assert wrong in str(problem(name, settings))
    assert problem(name, settings_of(name, tmp_path)) is None and name in OWN


def test_a_backend_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls, its failures, its death and its end."""
    backend = ProcessBackend("simm", config(settings_of("simm", tmp_path)))
    assert "simm" not in sys.modules
    backend.write(KEYS[0], parts(3))
    buffers = empty()
    assert backend.contains(KEYS) == 1 and backend.read(KEYS[0], buffers) and buffers == parts(3)
    assert not backend.read(KEYS[1], buffers)
    with pytest.raises(OSError, match="SiMM's client cannot list records"):
        backend.clear()
    backend.remove(KEYS[0])
    assert backend.contains(KEYS) == 0 and backend.contains(KEYS * 1500) == 0
    backend._process.kill()
    with pytest.raises(OSError, match="has died; it is started again soon"):
        backend.contains(KEYS)
    monkeypatch.setattr(runtime.storage.process, "AGAIN_S", 0.0)
    backend.write(KEYS[0], parts())
    assert backend.contains(KEYS) == 1
    process = backend._process._process
    backend.close()
    assert process.returncode == 0
    with pytest.raises(StartError, match=r"no file /none; correct LMCACHE_CONFIG_FILE"):
        ProcessBackend("lmcache", config({"config_file": "/none"}))


def test_doubles_are_found() -> None:
    """Else these tests would be of something else."""
    for name in PACKAGES:
        if name != "mooncake":
            module: ModuleType = import_store(PACKAGES[name].modules[1 if name == "nixl" else 0], name)
            assert str(module.__file__).startswith(str(DOUBLES))
