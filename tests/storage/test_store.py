"""Plug-ins: any class with the methods of Backend, whatever it raises."""

from collections.abc import Mapping, Sequence

import pytest

from runtime.errors import StartError, Unavailable
from runtime.storage.backend import BackendConfig
from runtime.storage.store import open_store
from tests.storage.stores import IDENTITY, PAGE, key_of, load, page_of, save


class Memory:
    """A backend in a dict, which fails when the test wants it to."""

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.records: dict[bytes, bytearray] = {}
        self.fails = config.settings.get("fails", False)
        if config.settings.get("refuses"):
            raise ValueError("no bucket")

    def contains(self, keys: Sequence[bytes]) -> int:
        self._fail()
        return next((number for number, key in enumerate(keys) if key not in self.records), len(keys))

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        self._fail()
        record = self.records.get(key)
        at = 0
        for buffer in buffers if record is not None else ():
            buffer[:] = record[at : at + buffer.nbytes]  # type: ignore[index]
            at += buffer.nbytes
        return record is not None

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        self._fail()
        self.records[key] = bytearray(b"".join(buffers))

    def remove(self, key: bytes) -> None:
        del self.records[key]

    def clear(self) -> int:
        self._fail()
        num_records = len(self.records)
        self.records.clear()
        return num_records

    def stats(self) -> Mapping[str, float]:
        return {"records": len(self.records)}

    def close(self) -> None:
        self._fail()

    def _fail(self) -> None:
        if self.fails:
            raise RuntimeError("the bucket is gone")


def test_a_plug_in_is_loaded_given_its_settings_and_verified() -> None:
    store = open_store("dynamic", {"module": "tests.storage.test_store:Memory", "url": "x"}, IDENTITY, PAGE)
    memory = store._backend
    config = memory.config  # type: ignore[attr-defined]
    assert config.settings == {"url": "x"} and config.identity == IDENTITY
    save(store, key_of(1), key_of(2))
    assert store.count([key_of(1), key_of(2), key_of(3)]) == 2 and load(store, key_of(2)) == page_of(
        key_of(2)
    )
    memory.records[key_of(1)][70] ^= 1  # type: ignore[attr-defined]
    assert (
        load(store, key_of(1)) is None and store.totals.pages_corrupt == 1 and store.stats() == {"records": 1}
    )
    assert store.clear() == 1 and load(store, key_of(2)) is None
    store.close()


def test_a_plug_in_that_fails_makes_misses() -> None:
    store = open_store(
        "dynamic", {"module": "tests.storage.test_store:Memory", "fails": True}, IDENTITY, PAGE
    )
    save(store, key_of(1))
    assert load(store, key_of(1)) is None and store.count([key_of(1)]) == 0
    with pytest.raises(Unavailable, match="log"):
        store.clear()
    store.close()
    assert (store.totals.errors, store.totals.pages_missed, store.totals.pages_written) == (5, 1, 0)


@pytest.mark.parametrize(
    "module", ["no.such.module:X", "tests.storage.test_store:Missing", "tests.storage.test_store:Memory"]
)
def test_a_plug_in_that_cannot_open_stops_the_start(module: str) -> None:
    with pytest.raises(StartError, match="cannot be opened"):
        open_store("dynamic", {"module": module, "refuses": True}, IDENTITY, PAGE)
