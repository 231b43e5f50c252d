"""Nothing that decides keys and values may change without the identity."""

import json
import os
from pathlib import Path

from runtime.storage.identity import identity, weights
from runtime.storage.settings import FileSettings, backend_settings, problem, tier_settings


def write_weights(
    path: Path, *, name: str = "w", payload: bytes = b"12345678", modified_s: int = 1000
) -> None:
    head = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + payload)
    os.utime(path, (modified_s, modified_s))


def test_weights_differ_by_name_header_length_and_date(tmp_path: Path) -> None:
    seen = []
    for number, change in enumerate([{}, {"name": "v"}, {"payload": b"123456789"}, {"modified_s": 1001}]):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_weights(folder / "model.safetensors", **change)  # type: ignore[arg-type]
        seen.append(identity(weights=weights(folder, None), page_size=16))
    (tmp_path / "0" / "model.safetensors").rename(tmp_path / "0" / "other.safetensors")
    seen += [
        identity(weights=weights(tmp_path / "0", None), page_size=16),
        identity(weights=weights(tmp_path / "0", None), page_size=32),
    ]
    assert len(set(seen)) == len(seen) and all(len(each) == 16 for each in seen)
    assert weights(tmp_path / "3", "mine")[0][3] == "mine"


def test_a_file_of_a_hugging_face_cache_is_named_by_its_digest(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    blob = tmp_path / "blobs" / ("ab" * 32)
    write_weights(blob)
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(blob)
    before = weights(tmp_path / "snapshot", None)
    os.utime(blob, (5, 5))
    assert weights(tmp_path / "snapshot", None) == before and before[0][3] == "ab" * 32


def test_where_pages_lie() -> None:
    assert FileSettings(dir="/x").folder({"XDG_CACHE_HOME": "/c"}) == Path("/x")
    assert FileSettings().folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/runtime/pages")
    assert FileSettings().folder({"XDG_CACHE_HOME": "no"}) == Path.home() / ".cache/runtime/pages"
    assert FileSettings().folder(
        {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "/s", "XDG_CACHE_HOME": "/c"}
    ) == Path("/s")


def test_settings_are_strict_and_shared_out() -> None:
    config = {"dir": "/x", "prefetch_threshold": 16, "num_threads": 2}
    assert problem("file", config) is None and problem("file", None) is None
    assert tier_settings(config).prefetch_threshold == 16 and backend_settings(config) == {"dir": "/x"}
    assert "it knows dir, max_bytes" in (problem("file", {"directory": "/x"}) or "")
    assert "num_threads" in (problem("file", {"num_threads": 0}) or "")
    assert "names no plug-in" in (problem("dynamic", {"url": "x"}) or "")
    assert "is not possible" in (problem("dynamic", {"module": "no colon"}) or "")
    assert problem("dynamic", {"module": "a.b:C", "url": "x"}) is None
