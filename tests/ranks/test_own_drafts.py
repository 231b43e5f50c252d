"""Drafts that a rank makes with a draft model: whatever the model, tokens are those of decoding one by one;
and a model drafts for itself what it will sample."""

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runtime.messages.memory import ChangeMemory, Part, UpdateWeights
from runtime.ranks.open_executor import DEVICES as MODULES
from runtime.scheduling.drafts import Draft
from tests.devices import taped
from tests.devices.drive import Planner, page_copies, sampling, speculation, start
from tests.models.make import make_checkpoint
from tests.models.make_heads import make_eagle3
from tests.ranks.test_verify import PARAMS, PROMPTS

NUM_TOKENS = 30


def opened(folder: Path, page_size: int = 4, **options: Any) -> Planner:
    executor, ready = start(
        folder, page_size=page_size, processors=["tests.ranks.test_verify:Alternating"], **options
    )
    planner = Planner(executor, ready, page_size)
    planner.follows = options.get("speculation") is not None
    return planner


def decoded(folder: Path, params: dict[str, Any], **options: Any) -> list[list[int]]:
    """What follows each prompt without drafts."""
    planner = opened(folder, **options)
    rows = [planner.row(slot, prompt, sampling(**params)) for slot, prompt in enumerate(PROMPTS)]
    for row in rows:
        planner.prefill(row)
    for _ in range(NUM_TOKENS):
        planner.run(rows, [])
    return [row.tokens[row.prompt_len :] for row in rows]


def drafted(
    planner: Planner,
    params: dict[str, Any],
    expected: list[list[int]],
    seed: int = 0,
    most: int = 4,
    share: float = 0.8,
) -> float:
    """Decodes with drafts of 1 to `most` tokens, the others one by one; asserts that tokens are the same.
    -> the part of the drafts that was accepted"""
    random = Random(seed)
    rows = [planner.row(slot, prompt, sampling(**params)) for slot, prompt in enumerate(PROMPTS)]
    for row in rows:
        planner.prefill(row, random.choice([1, 3, 100]))
    proposed = accepted = 0
    while left := [row for row in rows if len(row.tokens) - row.prompt_len < NUM_TOKENS]:
        verifies = [(row, Draft.own(random.randint(1, most))) for row in left if random.random() < share]
        own = [row for row, _ in verifies]
        before = [len(row.tokens) for row in own]
        planner.run([row for row in left if row not in own], [], verifies)
        for row, count, (_, draft) in zip(own, before, verifies, strict=True):
            proposed += len(draft.tokens)
            accepted += len(row.tokens) - count - 1
    for row, truth in zip(rows, expected, strict=True):
        assert row.tokens[row.prompt_len :][:NUM_TOKENS] == truth[:NUM_TOKENS]
    assert proposed > NUM_TOKENS
    return accepted / proposed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("other"), num_hidden_layers=1, hidden_size=32)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_model_drafts_for_another(folder: Path, other: Path, params: dict[str, Any]) -> None:
    expected = decoded(folder, params)
    drafted(opened(folder, speculation=speculation("STANDALONE", other)), params, expected)


@pytest.mark.parametrize("params", ["greedy", "random", "filtered", "logprobs"])
def test_a_model_knows_what_it_will_sample(folder: Path, params: str) -> None:
    expected = decoded(folder, PARAMS[params])
    for page_size in (1, 4):
        planner = opened(folder, page_size=page_size, speculation=speculation("STANDALONE", folder))
        assert drafted(planner, PARAMS[params], expected) >= 0.99


@pytest.mark.parametrize("params", ["greedy", "random", "penalties", "logprobs"])
def test_trees(folder: Path, other: Path, params: str) -> None:
    """What a model drafts for itself is a branch of its tree."""
    expected = decoded(folder, PARAMS[params])
    for draft in (folder, other):
        shape = {"topk": 3, "num_steps": 3, "num_draft_tokens": 9}
        planner = opened(folder, speculation=speculation("STANDALONE", draft, **shape))
        part = drafted(planner, PARAMS[params], expected, most=8)
        shape["num_steps"] = 1  # three nodes, whatever is asked for
        drafted(
            opened(folder, speculation=speculation("STANDALONE", draft, **shape)),
            PARAMS[params],
            expected,
            most=8,
        )
        assert draft is other or params == "penalties" or part > 0.25


@pytest.mark.parametrize("params", ["greedy", "random"])
def test_with_captured_steps(
    folder: Path, params: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without drafts are replayed between those that verify, and the draft model follows them."""
    monkeypatch.setitem(MODULES, "taped", taped.__name__)
    expected = decoded(folder, PARAMS[params])
    head = make_eagle3(tmp_path / "head")
    deep = make_checkpoint("qwen3", tmp_path / "deep", num_hidden_layers=6)
    graphs: dict[str, Any] = {"device": "taped", "max_slots": 5, "max_len": 64, "graph_sizes": [1, 2, 4]}
    for target, settings in (
        (folder, speculation("STANDALONE", folder)),
        (deep, speculation("EAGLE3", head)),
    ):
        planner = opened(target, speculation=settings, **graphs)
        tapes = planner.executor.tapes  # type: ignore[attr-defined]
        truth = expected if target is folder else decoded(deep, PARAMS[params])
        before = tapes.replays
        part = drafted(planner, PARAMS[params], truth, share=0.4)
        assert tapes.replays > before and (target is deep or part >= 0.99)


def test_drafts_that_the_host_does_not_know(folder: Path, other: Path) -> None:
    """As on devices that compute on their own: drafts stay there, unless a grammar or penalties need them."""
    for params in ("greedy", "random", "penalties", "token_bans"):
        expected = decoded(folder, PARAMS[params])
        for draft in (folder, other):
            planner = opened(folder, speculation=speculation("STANDALONE", draft))
            planner.executor.runner.drafts.is_host = False  # type: ignore[attr-defined]
            drafted(planner, PARAMS[params], expected)


def test_released_memory_comes_back(folder: Path) -> None:
    expected = decoded(folder, {})
    planner = opened(folder, speculation=speculation("STANDALONE", folder), max_total_tokens=4096)
    executor: Any = planner.executor
    before = executor.memory_saver.report(0, "")
    released: tuple[Part, ...] = ("weights", "kv_cache")
    report = executor.change_memory(ChangeMemory(1, released))
    assert (report.weights_bytes, report.pages_bytes) == (0, 0)
    report = executor.change_memory(ChangeMemory(2, ()))
    assert (report.weights_bytes, report.pages_bytes) == (before.weights_bytes, before.pages_bytes)
    assert drafted(planner, {}, expected) >= 0.99
    executor.update_weights(UpdateWeights(3, str(folder), "auto", is_trial=False))
    assert drafted(planner, {}, expected) >= 0.99


def test_pages_come_back_from_host_memory_with_entries(folder: Path) -> None:
    """A prefix whose pages were saved and loaded has the draft model's keys and values too."""
    prompt = [i * 5 % 240 for i in range(16)]
    memory = os.memfd_create("host-test")
    options: dict[str, Any] = {"host_ratio": 1.0, "host_fds": [memory], "max_total_tokens": 128}
    planner = opened(folder, speculation=speculation("STANDALONE", folder), **options)
    first = planner.row(0, prompt, sampling())
    planner.prefill(first)
    pages = first.pages[:3]
    planner.page_copies = page_copies(saves={page: host for host, page in enumerate(pages)})
    planner.run([first], [])
    back = [planner.free.pop() for _ in pages]
    second = planner.row(1, prompt, sampling())
    second.pages, second.computed = list(back), 12
    planner.page_copies = page_copies(loads=dict(enumerate(back)))
    planner.prefill(second)
    for _ in range(4):
        count = len(second.tokens)
        planner.run([], [], [(second, Draft.own(4))])
        assert len(second.tokens) == count + 5
    os.close(memory)
