"""The file backend through the store: pages come back as they were written, or not at all."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import StartError
from runtime.storage import files
from runtime.storage.record import HEADER_BYTES
from runtime.storage.store import Store
from tests.storage.stores import IDENTITY, PAGE, key_of, load, open_at, page_of, save

RECORD = PAGE + HEADER_BYTES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_at(tmp_path / "pages")
    yield store
    store.close()


def path_of(folder: Path, key: bytes) -> Path:
    (path,) = folder.rglob(f"{key.hex()}.page")
    return path


def test_a_page_comes_back_also_in_the_next_life(tmp_path: Path) -> None:
    keys = [key_of(i) for i in range(3)]
    store = open_at(tmp_path)
    save(store, *keys[:2])
    assert [load(store, key) for key in keys] == [page_of(keys[0]), page_of(keys[1]), None]
    assert (store.count(keys), store.count(keys[2:]), store.count([])) == (2, 0, 0)
    assert (store.totals.pages_written, store.totals.pages_read, store.totals.pages_missed) == (2, 2, 1)
    assert (store.totals.bytes_written, store.totals.bytes_read) == (2 * PAGE, 2 * PAGE)
    store.close()
    again = open_at(tmp_path)
    assert load(again, keys[0]) == page_of(keys[0]) and again.stats()["records"] == 2
    again.close()


def test_more_parts_than_one_system_call_takes(store: Store) -> None:
    page = memoryview(bytearray(page_of(key_of(0))))
    store.save(key_of(0), [page[i : i + 1] for i in range(PAGE)])
    assert load(store, key_of(0)) == page


@settings(max_examples=60, deadline=None)
@given(
    damage=st.one_of(
        st.tuples(st.just("flip"), st.integers(0, RECORD - 1), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.integers(0, RECORD - 1), st.just(0)),
        st.tuples(st.just("add"), st.just(0), st.integers(1, 100)),
    )
)
def test_damage_of_any_kind_is_a_miss_and_goes_away(
    tmp_path_factory: pytest.TempPathFactory, damage: tuple[str, int, int]
) -> None:
    folder = tmp_path_factory.mktemp("pages")
    store, key = open_at(folder), key_of(1)
    save(store, key)
    path = path_of(folder, key)
    record = bytearray(path.read_bytes())
    kind, place, value = damage
    if kind == "flip":
        record[place] ^= value
    path.write_bytes(record[:place] if kind == "cut" else record + bytes(value) if kind == "add" else record)
    assert load(store, key) is None
    assert (store.totals.pages_corrupt, store.totals.errors, path.exists(), store.count([key])) == (
        1,
        0,
        False,
        0,
    )
    save(store, key)
    assert load(store, key) == page_of(key)
    store.close()


def test_records_of_others_are_strangers(tmp_path: Path) -> None:
    """Another page's record under this name, another model's, another size."""
    store, other = open_at(tmp_path), open_at(tmp_path, identity=b"o" * 16)
    save(store, key_of(1), key_of(2))
    save(other, key_of(3))
    assert other.count([key_of(1)]) == 0 and load(other, key_of(1)) is None
    path_of(tmp_path, key_of(2)).write_bytes(path_of(tmp_path, key_of(1)).read_bytes())
    assert load(store, key_of(2)) is None and store.totals.pages_corrupt == 1
    foreign = tmp_path / IDENTITY.hex() / key_of(3).hex()[:2]
    foreign.mkdir(exist_ok=True)
    path_of(tmp_path, key_of(3)).rename(foreign / f"{key_of(3).hex()}.page")
    assert load(store, key_of(3)) is None and store.totals.pages_corrupt == 2
    larger = open_at(tmp_path, page_bytes=PAGE + 1)
    assert (
        larger.load(key_of(1), [memoryview(bytearray(PAGE + 1))]) is False
        and larger.totals.pages_corrupt == 1
    )
    for each in (store, other, larger):
        each.close()


def test_the_bound_holds_and_the_least_recently_used_go(tmp_path: Path) -> None:
    store = open_at(tmp_path, max_bytes=4 * RECORD)
    keys = [key_of(i) for i in range(6)]
    save(store, *keys[:4])
    assert load(store, keys[0]) is not None
    save(store, *keys[4:])
    assert [load(store, key) is not None for key in keys] == [True, False, False, True, True, True]
    assert (
        sum(path.stat().st_size for path in tmp_path.rglob("*.page")) == store.stats()["bytes"] == 4 * RECORD
    )
    assert store.stats()["evicted"] == 2
    store.close()
    again = open_at(tmp_path, max_bytes=2 * RECORD)
    assert len(list(tmp_path.rglob("*.page"))) == again.stats()["records"] == 2
    again.close()


def test_two_servers_share_a_directory(tmp_path: Path) -> None:
    one, two = open_at(tmp_path, max_bytes=16 * RECORD), open_at(tmp_path, max_bytes=16 * RECORD)
    keys = [key_of(i) for i in range(40)]
    save(one, keys[0])
    assert two.count(keys[:2]) == 1 and load(two, keys[0]) == page_of(keys[0])
    for i in range(1, 40):
        save(two if i % 2 else one, keys[i])
        assert len(list(tmp_path.rglob("*.page"))) <= 19  # each may be one look behind the other
    found = [load(store, key) for store in (one, two) for key in keys]
    assert all(page in (None, page_of(key)) for page, key in zip(found, keys * 2, strict=True)) and any(found)
    assert one.totals.errors == two.totals.errors == one.totals.pages_corrupt == two.totals.pages_corrupt == 0
    assert one.clear() > 0 and load(two, keys[-1]) is None
    one.close()
    assert len(list((tmp_path / files.WRITING).iterdir())) == 1  # the other one's
    two.close()


def test_trouble_is_counted_and_reported_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(store, key_of(0))
    logged: list[str] = []

    def full(file: int, buffers: list[memoryview]) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        patch.setattr(
            store, "_log", type("Log", (), {"error": lambda self, text, **extra: logged.append(text)})()
        )
        save(store, key_of(1), key_of(2))
    assert (len(logged), store.totals.errors, store.totals.pages_written) == (1, 2, 1)
    assert not [
        path
        for path in (tmp_path / "pages" / files.WRITING).rglob("*")
        if path.is_file() and path.name != "lock"
    ]
    assert load(store, key_of(0)) == page_of(key_of(0)) and load(store, key_of(1)) is None


def test_a_directory_that_was_away_is_used_again(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "pages", tmp_path / "elsewhere"
    store = open_at(folder)
    save(store, key_of(0))
    folder.rename(elsewhere)
    save(store, key_of(1))
    assert load(store, key_of(0)) is None and not folder.exists() and store.totals.errors == 1
    elsewhere.rename(folder)
    save(store, key_of(1))
    assert load(store, key_of(0)) == page_of(key_of(0)) and load(store, key_of(1)) == page_of(key_of(1))
    for path in sorted(folder.rglob("*"), reverse=True):  # an empty one in its place
        path.rmdir() if path.is_dir() else path.unlink()
    save(store, key_of(2))
    assert load(store, key_of(2)) == page_of(key_of(2)) and load(store, key_of(0)) is None
    store.close()


@pytest.mark.parametrize("number", [28, 30])
def test_a_disk_that_takes_nothing_at_the_start_is_written_to_later(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_at(tmp_path)
    save(store, key_of(0))
    store.close()

    def full(*_: object, **__: object) -> str:
        raise OSError(number, "it takes nothing")

    with monkeypatch.context() as patch:
        patch.setattr(files.tempfile, "mkdtemp", full)
        store = open_at(tmp_path)
        save(store, key_of(1))
        assert load(store, key_of(0)) == page_of(key_of(0)) and load(store, key_of(1)) is None
    save(store, key_of(1))
    assert load(store, key_of(1)) == page_of(key_of(1))
    store.close()


def test_what_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match='"dir"'):
        open_at(tmp_path / "file")
    with pytest.raises(StartError, match='"max_bytes"'):
        open_at(tmp_path / "small", max_bytes=RECORD - 1)


WRITER = """
import sys
from pathlib import Path
from tests.storage.stores import key_of, open_at, save
store = open_at(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 10**9):
    save(store, key_of(number))
    print(number, flush=True)
"""


def test_killed_writers_leave_no_wrong_page_and_no_litter(tmp_path: Path) -> None:
    source, first = random.Random(0), 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(first)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line, _ in zip(process.stdout, range(source.randrange(1, 40)), strict=False):
            first = int(line) + 1
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        process.wait()
    (tmp_path / files.WRITING / "left").mkdir()
    (tmp_path / files.WRITING / "left" / "7").write_bytes(b"half a record")
    os.utime(tmp_path / files.WRITING / "left", (0, 0))
    store = open_at(tmp_path)
    assert len(list((tmp_path / files.WRITING).iterdir())) == 1
    pages = [load(store, key_of(number)) for number in range(first + 1)]
    assert all(page in (None, page_of(key_of(number))) for number, page in enumerate(pages))
    assert None not in pages[:first] and store.totals.pages_corrupt == 0
    store.close()
