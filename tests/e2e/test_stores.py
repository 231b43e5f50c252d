"""Pages that come back from stores whose packages CI lacks, through doubles of these: tokens are those of
transformers."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import runtime
from runtime.errors import OptionsError, StartError
from tests.e2e.test_storage import FULL, PROMPT, Generate, ask, metric, options
from tests.storage.test_packages import DOUBLES, forget, settings_of

pytestmark = pytest.mark.anyio

Checkpoint = Callable[[str], Path]


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    monkeypatch.syspath_prepend(DOUBLES)
    monkeypatch.setenv("PYTHONPATH", str(DOUBLES))
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)
    yield
    forget()


async def come_back(given: dict[str, Any], expected: list[int]) -> None:
    """Asks twice, and forgets what is nearer in between."""
    async with runtime.Engine(**given) as engine:
        assert await ask(engine) == (expected, 0)
        with anyio.fail_after(30):
            while metric(engine, 'runtime_storage_pages_total{event="written"}') < FULL // 16:
                await anyio.sleep(0.01)
        await engine.flush_cache()
        assert await ask(engine) == (expected, FULL)
        assert metric(engine, 'runtime_storage_pages_total{event="read"}') == FULL // 16
        assert metric(engine, "runtime_storage_errors_total") == 0


async def test_lmcache(checkpoint: Checkpoint, reference: Generate, tmp_path: Path, doubles: None) -> None:
    """--enable-lmcache alone: the tiers and the policy follow from it. LMCache is in a process of its own."""
    given = options(tmp_path, checkpoint("llama"))
    for name in [name for name in given if name.startswith("hicache") or name == "enable_hierarchical_cache"]:
        del given[name]
    settings = {"prefetch_threshold": 16}
    await come_back(
        {**given, "enable_lmcache": True, "hicache_storage_backend_extra_config": settings},
        reference("llama", PROMPT, 6),
    )
    assert "lmcache" not in sys.modules


@pytest.mark.parametrize("backend", ["nixl", "hf3fs"])
async def test_stores(
    backend: str, checkpoint: Checkpoint, reference: Generate, tmp_path: Path, doubles: None
) -> None:
    given = options(tmp_path, checkpoint("llama"), hicache_storage_backend=backend)
    settings = {**settings_of(backend, tmp_path), "prefetch_threshold": 16}
    await come_back(
        {**given, "hicache_storage_backend_extra_config": settings}, reference("llama", PROMPT, 6)
    )


async def test_what_is_missing_is_refused_before_a_start(checkpoint: Checkpoint, tmp_path: Path) -> None:
    given = options(tmp_path, checkpoint("llama"))
    del given["hicache_storage_backend_extra_config"]
    with pytest.raises(StartError, match="--hicache-storage-backend eic needs the module eic"):
        settings = settings_of("eic", tmp_path)
        runtime.Engine(
            **given | {"hicache_storage_backend": "eic", "hicache_storage_backend_extra_config": settings}
        )
    with pytest.raises(OptionsError, match="hicache-storage-backend-extra-config .*dir"):
        runtime.Engine(**given | {"hicache_storage_backend": "hf3fs"})
    del given["hicache_storage_backend"], given["hicache_storage_prefetch_policy"]
    with pytest.raises(StartError, match="--enable-lmcache needs the module lmcache.v1.cache_engine"):
        runtime.Engine(**given, enable_lmcache=True)
