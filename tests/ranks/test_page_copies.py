"""Pages move between the cache and host memory, on every torch device: tokens are those of a run that never
moved anything."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.devices.executor import Executor
from runtime.devices.host_memory import LAYOUTS, HostPages
from runtime.errors import StartError
from runtime.messages.ranks import RankReady
from tests.devices.drive import Planner, page_copies, sampling, start
from tests.e2e.conftest import Generate, checkpoint, reference
from tests.models.make import make_checkpoint

__all__ = ["checkpoint", "reference"]  # fixtures
DEVICES = ("cpu",)
PROMPT = [7 * i % 250 for i in range(22)]
OTHERS = [11 * i % 250 for i in range(30)]
KV_DTYPES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3", "gemma4"])
def family(request: pytest.FixtureRequest) -> str:
    """One of each kind of cache: keys and values of heads, latents with rotary parts of another size, and
    heads whose size differs between layers."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(family, tmp_path_factory.mktemp("model"))


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("host-test")
    yield fd
    os.close(fd)


def open_rank(folder: Path, fd: int, **options: Any) -> tuple[Executor, RankReady]:
    return start(folder, **({"host_ratio": 1.0, "host_fds": [fd], "max_total_tokens": 128} | options))


class Run(Planner):
    """Saves a prefix, lets others overwrite it, and loads it into other pages."""

    def save(self, pages: list[int], hosts: list[int]) -> None:
        """By a plan without rows."""
        self.page_copies = page_copies(saves=dict(zip(pages, hosts, strict=True)))
        result = self.run([], [])
        assert (
            result is not None
            and result.step == self.step
            and len(result.token_ids) == 0
            and result.width == -1
        )

    def overwrite(self) -> None:
        """Every page there is, by other tokens."""
        for slot in (1, 2):
            self.known_pages.pop(slot, None)
        while len(self.free) >= 8:
            self.prefill(self.row(1, OTHERS[: 4 * min(7, len(self.free))], sampling()))

    def again(self, hosts: list[int], num_new: int) -> list[int]:
        """The prompt once more, its first pages from host memory."""
        shared = len(hosts) * self.page_size
        row = self.row(3, PROMPT, sampling())
        row.pages, row.computed = [self.free.pop() for _ in hosts], shared
        self.page_copies = page_copies(loads=dict(zip(hosts, row.pages, strict=True)))
        return self.generate(row, num_new)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alone", [False, True], ids=["with rows", "by themselves"])
def test_a_prefix_comes_back(device: str, layout: str, alone: bool, folder: Path, memory: int) -> None:
    executor, ready = open_rank(folder, memory, device=device, host_layout=layout)
    assert ready.num_host_pages == ready.num_pages - 1
    run = Run(executor, ready, 4)
    first = run.row(0, PROMPT, sampling())
    expected = run.generate(first, 8)
    hosts = [9, 2, 31, 4, 17]
    run.save(first.pages[:5], hosts)
    run.free += first.pages  # the next to be given away
    run.overwrite()
    run.free[:0] = [page for page in range(1, ready.num_pages) if page not in run.free]
    if alone:
        pages = [run.free.pop() for _ in hosts]
        run.page_copies = page_copies(loads=dict(zip(hosts, pages, strict=True)))
        assert run.run([], []) is not None
        row = run.row(3, PROMPT, sampling())
        row.pages, row.computed = pages, 20
        assert run.generate(row, 8) == expected
    else:
        assert run.again(hosts, 8) == expected
    executor.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copies_change_no_token_whatever_the_dtype_of_pages(
    device: str, layout: str, kv_dtype: str, folder: Path, memory: int
) -> None:
    """Also when a save, a load of what it saved and an overwriting forward come in one plan; prefix hits and
    recompute agree as well."""
    executor, ready = open_rank(folder, memory, device=device, host_layout=layout, kv_dtype=kv_dtype)
    run = Run(executor, ready, 4)
    first = run.row(0, PROMPT, sampling())
    expected = run.generate(first, 6)
    shared = run.row(1, PROMPT, sampling(), prefix=first, shared=20)
    assert run.generate(shared, 6) == expected, "prefix hit"
    assert run.generate(run.row(2, PROMPT, sampling()), 6) == expected, "computed again"
    hosts, pages = [3, 1, 2, 7, 5], [run.free.pop() for _ in range(5)]
    row = run.row(3, PROMPT, sampling())
    row.pages, row.computed = pages, 20
    other = run.row(4, OTHERS[:20], sampling())
    other.pages = first.pages[:5]  # given away by the plan that saves them
    run.page_copies = page_copies(
        saves=dict(zip(first.pages[:5], hosts, strict=True)), loads=dict(zip(hosts, pages, strict=True))
    )
    run.run([], [(other, 20), (row, 2)])
    for _ in range(5):
        run.run([row], [])
    assert row.tokens[len(PROMPT) :] == expected
    executor.close()


def prompt_logprobs(folder: Path, **options: Any) -> tuple[np.ndarray, int]:
    """Of a prompt that is computed in pieces, so that most of what it sees is read from pages. -> and the
    bytes of all pages"""
    executor, ready = start(folder, max_total_tokens=128, **options)
    run = Run(executor, ready, 4)
    row = run.row(0, OTHERS, sampling(prompt_logprobs=0))
    run.prefill(row, chunk=3)
    executor.close()
    return np.concatenate([part.logprobs for part in row.prompt])[:-1], ready.pages_bytes


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"), [("bfloat16", 0.02), ("fp8_e4m3", 0.3), ("fp8_e5m2", 0.4)]
)
def test_narrow_pages_are_near_fp32(kv_dtype: str, tolerance: float, folder: Path) -> None:
    exact, wide = prompt_logprobs(folder, dtype="float32")
    found, narrow = prompt_logprobs(folder, dtype="float32", kv_dtype=kv_dtype)
    assert narrow == wide * (2 if kv_dtype == "bfloat16" else 1) // 4
    assert exact.shape == (len(OTHERS) - 1,) and np.isfinite(found).all()
    error = np.abs(found - exact).mean()  # of one token it says little: the tiny models are sharp
    assert tolerance / 100 < error < tolerance, "near, and not the same"


def test_bf16_pages_in_a_bf16_model_change_no_bit(folder: Path) -> None:
    exact, size = prompt_logprobs(folder, dtype="bfloat16")
    found, same = prompt_logprobs(folder, dtype="bfloat16", kv_dtype="bfloat16")
    assert found.tobytes() == exact.tobytes() and same == size


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_storage_and_the_next_rank_read_what_was_saved(
    device: str, layout: str, family: str, folder: Path, memory: int, reference: Generate
) -> None:
    """Host memory outlives the rank; pages that were copied within it, by its views alone, are as good."""
    options = {"device": device, "host_layout": layout, "dtype": "float32"}
    executor, ready = open_rank(folder, memory, **options)
    run = Run(executor, ready, 4)
    first = run.row(0, PROMPT, sampling())
    expected = reference(family, PROMPT, 8)
    assert run.generate(first, 8) == expected
    run.save(first.pages[:5], [1, 2, 3, 4, 5])
    connector = HostPages(memory, ready.num_host_pages, ready.host_part_bytes, layout)
    keys = executor.runner.kv[0][0].view(ready.num_pages, -1).cpu().numpy()  # type: ignore[attr-defined]
    assert b"".join(connector.views(2))[: connector.part_bytes[0]] == keys[first.pages[1]].tobytes()
    for page in range(1, 6):
        for old, new in zip(connector.views(page), connector.views(page + 20), strict=True):
            new[:] = old
            old[:] = bytes(len(old))
    executor.close()
    del run, executor
    executor, again = open_rank(folder, memory, **(options | {"host_ratio": 0.5}))
    assert again.num_host_pages == ready.num_host_pages, "memory that has a size keeps it"
    assert Run(executor, again, 4).again([21, 22, 23, 24, 25], 8) == expected
    executor.close()


def test_what_goes_wrong_in_a_copy_surfaces_in_the_step(folder: Path, memory: int) -> None:
    executor, ready = open_rank(folder, memory)
    run = Run(executor, ready, 4)
    for wrong in (
        page_copies(loads={10**6: 1}),
        page_copies(saves={1: ready.num_host_pages}),
        page_copies(saves={-1: 1}),
    ):
        run.page_copies = wrong
        with pytest.raises(IndexError):
            run.run([], [])
    cache, _ = executor.runner.copies._layers[1][0]  # type: ignore[attr-defined]
    cache.flags.writeable = False  # so the copy itself fails, in the thread that makes it
    row = run.row(0, PROMPT, sampling())
    for rows in ([], [(row, len(PROMPT))]):
        run.page_copies = page_copies(loads={1: 1})
        with pytest.raises(ValueError, match="read-only"):
            run.run([], rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_of_pages(device: str, layout: str, folder: Path, memory: int) -> None:
    """Neighbours on both sides, on one, and in reverse, whatever their order: every page gets where it
    belongs and no other is touched."""
    executor, ready = open_rank(folder, memory, device=device, host_layout=layout)
    run = Run(executor, ready, 4)
    kv = executor.runner.kv  # type: ignore[attr-defined]
    caches = [cache.view(ready.num_pages, -1) for pair in kv for cache in pair]
    for i, cache in enumerate(caches):
        cache[:] = torch.arange(len(cache), dtype=cache.dtype)[:, None] + 100 * i
    there = {5: 20, 4: 21, 9: 3, 11: 5, 10: 4, 12: 6, 30: 31, 14: 7, 1: 1}
    run.save(list(there), list(there.values()))
    for cache in caches:
        cache[:] = -1
    back = {20: 8, 21: 9, 3: 2, 4: 3, 5: 4, 6: 30, 31: 31, 7: 12, 1: 32}
    run.page_copies = page_copies(loads=back)
    run.run([], [])
    came = {back[host]: page for page, host in there.items()}
    for i, cache in enumerate(caches):
        expected = [came[page] + 100 * i if page in came else -1 for page in range(1, ready.num_pages)]
        assert cache[1:].float().cpu().tolist() == [[value] * cache.shape[1] for value in expected]
    executor.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_bytes": 1 << 50}, "--hicache-size asks for"),
        ({"host_ratio": 1e-9}, "--hicache-ratio"),
        ({"host_bytes": 1}, "--page-size"),
    ],
)
def test_sizes_that_cannot_be(options: dict[str, Any], message: str, folder: Path, memory: int) -> None:
    with pytest.raises(StartError, match=message):
        open_rank(folder, memory, **options)


def test_null_has_a_host_tier(memory: int) -> None:
    executor, ready = start(
        "", device="null", host_ratio=2.0, host_fds=[memory], max_total_tokens=400, num_threads=None
    )
    assert ready.num_host_pages == 200 and ready.host_part_bytes == (1 << 16,)
    planner = Planner(executor, ready, 4)
    planner.page_copies = page_copies(saves={1: 1}, loads={2: 3})
    result = planner.run([], [])
    assert result is not None and len(result.token_ids) == 0


def test_layouts_agree_and_lose_no_byte() -> None:
    """Parts of different sizes; each byte of the memory belongs to one part of one page."""
    for layout in LAYOUTS:
        fd = os.memfd_create("host-test")
        os.ftruncate(fd, 5 * 15)
        pages = HostPages(fd, 5, (4, 2, 6, 3), layout)
        os.close(fd)
        for part in range(4):
            pages.part(part)[:] = np.arange(5, dtype=np.uint8)[:, None] * 4 + part
        for page in range(5):
            joined = b"".join(pages.views(page))
            assert joined == bytes(
                [4 * page] * 4 + [4 * page + 1] * 2 + [4 * page + 2] * 6 + [4 * page + 3] * 3
            )
        assert len(pages.views(0)) == (1 if layout == "page_first" else 4)
    assert [pages.part(part)[:2].tobytes() for part in (2, 3)] == [
        bytes([2] * 6 + [6] * 6),
        bytes([3] * 3 + [7] * 3),
    ]
    stands = [pages.part(part).ctypes.data - pages.address for part in range(4)]
    assert stands == [0, 50, 4, 52], "keys of a page, then of the next; behind all keys the values"
