"""Verify rows on a rank: whatever the drafts, results are those of decoding one by one."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.messages.requests import TokenBans
from runtime.messages.sampling import Processor
from runtime.messages.speculation import Speculation
from runtime.ranks.open_executor import DEVICES as MODULES
from runtime.ranks.transfers import Direct
from runtime.scheduling.drafts import Draft
from runtime.text.token_bans import packed
from tests.devices import taped
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make import VOCAB_SIZE, make_checkpoint
from tests.ranks.test_windows import MODELS, PAGE_SIZE, WINDOW

NUM_TOKENS = 24
PROMPTS = [[5, 9, 100, 7], [i * 7 % 250 for i in range(19)], [3, 4]]
# of 250 allowed tokens, only those follow each other of which one is even and one odd
PARITY = TokenBans(packed(tuple(range(250))), tuple((a, b) for a in range(250) for b in range(a % 2, 250, 2)))
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": -3},
    "penalties": {"temperature": 0.7, "seed": 1, "frequency_penalty": 0.9, "presence_penalty": 0.3},
    "repetition": {"repetition_penalty": 1.4},
    "logprobs": {"temperature": 1.0, "seed": 5, "top_logprobs": 3, "logprob_ids": [1, 2]},
    "bias": {"bias_ids": [9, 11], "bias_values": [4.0, 3.0], "stop_ids": [9], "min_len": 20},
    "processor": {"processor": Processor("Alternating", {})},
    "token_bans": {"temperature": 1.0, "seed": 2, "token_bans": PARITY},
}


@pytest.fixture(autouse=True)
def _taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "taped", taped.__name__)


class Alternating:
    """A logit processor that depends on all tokens so far."""

    def __init__(self, params: dict[str, Any]) -> None:
        return None

    def __call__(self, tokens: list[int], prompt_len: int, logits: Tensor) -> Tensor:
        logits[sum(tokens) % 50 : sum(tokens) % 50 + 20] += 6.0
        return logits


class Guesses:
    """Drafts for rows whose tokens are known beforehand, some of them wrong."""

    def __init__(self, seed: int, luck: float, *, has_trees: bool) -> None:
        self.random = Random(seed)
        self.luck = luck
        self.has_trees = has_trees

    def draft(self, row: Row, truth: list[int]) -> Draft | None:
        """Up to five guesses of what follows the row's tokens, of which all are `truth`."""
        random = self.random
        left = truth[len(row.tokens) - row.prompt_len :]
        count = min(random.randint(0, 5), len(left) - 1)
        if count <= 0:
            return None
        tokens: list[int] = []
        parents: list[int] = []
        depths = [0]
        for i in range(count):
            parent = random.randint(max(0, i - 2), i) if self.has_trees else i
            depths.append(depths[parent] + 1)
            is_right = random.random() < self.luck
            tokens.append(left[depths[parent]] if is_right else random.randrange(250))
            parents.append(parent)
        return Draft(tokens, parents if self.has_trees else None)


def opened(folder: Path, page_size: int = 4, window: int = 0, **options: Any) -> Planner:
    executor, ready = start(folder, page_size=page_size, processors=[f"{__name__}:Alternating"], **options)
    return Planner(executor, ready, page_size, window=window)


def prefilled(planner: Planner, params: dict[str, Any], chunk: int = 7) -> list[Row]:
    rows = [planner.row(slot, prompt, sampling(**params)) for slot, prompt in enumerate(PROMPTS)]
    for row in rows:
        planner.prefill(row, chunk)
    return rows


def decoded(planner: Planner, params: dict[str, Any]) -> list[Row]:
    """Without drafts."""
    rows = prefilled(planner, params)
    for _ in range(NUM_TOKENS - 1):
        planner.run(rows, [])
    return rows


def verified(planner: Planner, params: dict[str, Any], truths: list[list[int]], guesses: Guesses) -> int:
    """With drafts, in steps with rows of all kinds; asserts that tokens are the same. -> steps"""
    rows = prefilled(planner, params)
    return finish(planner, rows, truths, guesses)


def finish(planner: Planner, rows: list[Row], truths: list[list[int]], guesses: Guesses) -> int:
    begin = planner.step
    while left := [row for row in rows if len(row.tokens) - row.prompt_len < NUM_TOKENS]:
        drafts = {row.slot: guesses.draft(row, truths[row.slot]) for row in left}
        decodes = [row for row in left if drafts[row.slot] is None]
        planner.run(decodes, [], [(row, draft) for row in left if (draft := drafts[row.slot]) is not None])
    for row, truth in zip(rows, truths, strict=True):
        assert row.tokens[row.prompt_len :][:NUM_TOKENS] == truth
    return planner.step - begin


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("has_trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_tokens_are_those_without_drafts(folder: Path, params: dict[str, Any], has_trees: bool) -> None:
    expected = decoded(opened(folder), params)
    truths = [row.tokens[row.prompt_len :] for row in expected]
    for luck in (0.0, 0.7, 1.0):
        planner = opened(folder, page_size=3)
        rows = prefilled(planner, params)
        steps = finish(planner, rows, truths, Guesses(3, luck, has_trees=has_trees))
        assert steps < NUM_TOKENS - 6 if luck == 1.0 else steps <= NUM_TOKENS
        for row, other in zip(rows, expected, strict=True):
            assert [entry[0] for entry in row.results] == [entry[0] for entry in other.results][
                : len(row.results)
            ]
            for one, two in zip(row.results, other.results, strict=False):
                assert one[2] == two[2]
                np.testing.assert_allclose([one[1], *one[3]], [two[1], *two[3]], atol=1e-4)


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "deepseek_v32", "gemma2", "gemma4", "gpt_oss", "llama4", "mistral"]
)
def test_families(family: str, tmp_path: Path) -> None:
    """Latent and sparse attention, score caps, sinks, chunks and windows, in chains and trees."""
    folder = make_checkpoint(family, tmp_path)
    expected = [row.tokens[row.prompt_len :] for row in decoded(opened(folder), {})]
    for has_trees in (False, True):
        verified(opened(folder, page_size=2), {}, expected, Guesses(1, 0.7, has_trees=has_trees))


@pytest.mark.parametrize("has_trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("model", MODELS)
def test_windows_in_a_pool_of_their_own(model: str, has_trees: bool, tmp_path: Path) -> None:
    family, overrides = MODELS[model]
    folder = make_checkpoint(family, tmp_path, **overrides)
    options = {"page_size": PAGE_SIZE, "max_len": 256, "max_step_tokens": 8, "window_ratio": 0.1}
    expected = [row.tokens[row.prompt_len :] for row in decoded(opened(folder, window=WINDOW, **options), {})]
    verified(opened(folder, window=WINDOW, **options), {}, expected, Guesses(2, 0.7, has_trees=has_trees))


@pytest.mark.parametrize("has_trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("params", ["greedy", "random", "penalties", "logprobs", "token_bans"])
def test_with_captured_steps(folder: Path, params: str, has_trees: bool) -> None:
    """Steps without drafts are replayed between those that verify; these run in pieces where these fit."""
    expected = [row.tokens[row.prompt_len :] for row in decoded(opened(folder), PARAMS[params])]
    for piecewise_sizes in ([], [16]):
        planner = opened(
            folder,
            page_size=4,
            device="taped",
            max_slots=5,
            max_len=64,
            graph_sizes=[1, 2, 4],
            piecewise_sizes=piecewise_sizes,
        )
        guesses = Guesses(4, 0.6, has_trees=has_trees)
        rows = prefilled(planner, PARAMS[params])
        tapes = planner.executor.tapes  # type: ignore[attr-defined]
        while left := [row for row in rows if len(row.tokens) - row.prompt_len < NUM_TOKENS]:
            if guesses.random.random() < 0.5:
                before = tapes.replays
                planner.run(left, [])
                assert tapes.replays > before
                continue
            drafts = [(row, guesses.draft(row, expected[row.slot]) or Draft([1])) for row in left]
            planner.run([], [], drafts)
        for row in rows:
            assert row.tokens[row.prompt_len :][:NUM_TOKENS] == expected[row.slot]


def test_drafts_that_are_sure_are_not_sampled(folder: Path) -> None:
    expected = [row.tokens[row.prompt_len :] for row in decoded(opened(folder), {})]
    planner = opened(folder)
    rows = prefilled(planner, {})
    result = planner.run([], [], [(row, Draft(expected[row.slot][1:9], is_sure=True)) for row in rows])
    assert result is not None and result.num_tokens is None and len(result.token_ids) == 3
    assert finish(planner, rows, expected, Guesses(0, 0.0, has_trees=False)) <= NUM_TOKENS - 10


class Late(Direct):
    """Transfers that bring nothing before it is asked for."""

    def fetch(self, tensors: Any) -> Any:
        here = super().fetch([tensor.clone() for tensor in tensors])
        here.is_done = lambda: False  # type: ignore[method-assign]
        return here


def test_captured_steps_do_not_wait_for_accepted_counts(folder: Path) -> None:
    """Positions come from the device: a decode is replayed before the host knows how many drafts the last
    step accepted."""
    expected = [row.tokens[row.prompt_len :] for row in decoded(opened(folder), {})]
    planner = opened(folder, device="taped", max_slots=5, max_len=64, graph_sizes=[1])
    row = planner.row(0, PROMPTS[1], sampling())
    planner.prefill(row)
    loaded = planner.executor.runner  # type: ignore[attr-defined]
    loaded.transfers = loaded.effects.transfers = Late()
    loaded.device.graphs.reads_lengths = False
    truth = expected[1]
    row.pages += [planner.free.pop() for _ in range(4)]
    plans = [planner.plan([], [], [(row, Draft([truth[1], truth[2], (truth[3] + 1) % VOCAB_SIZE]))])]
    results = [planner.executor.launch(plans[0])]
    lengths = loaded.slots.lengths
    assert lengths._coming, "what was accepted is not known"
    for _ in range(3):
        plan = planner.plan([row], [])
        results.append(planner.executor.launch(plan))
        assert lengths._coming
    tokens = [token for result in results for token in result.result().token_ids.tolist()]
    assert tokens == truth[1 : 1 + len(tokens)] and len(tokens) == 3 + 3
    assert lengths.starts(np.array([0])).tolist() == [len(PROMPTS[1]) + 6]
    assert torch.equal(lengths.on_device[:1], torch.tensor([len(PROMPTS[1]) + 6]))


@pytest.mark.parametrize(("temperature", "is_taken"), [(1.0, True), (0.0, False)])
def test_thresholds_accept_what_is_not_sampled(temperature: float, is_taken: bool, tmp_path: Path) -> None:
    """A threshold of 0 takes any draft where tokens are random, with its own log probability."""
    speculation = Speculation(algorithm="NGRAM", num_steps=0, topk=1, num_draft_tokens=4, accept_single=0.0)
    executor, ready = start(make_checkpoint("qwen3", tmp_path), speculation=speculation)
    planner = Planner(executor, ready, PAGE_SIZE)
    row = planner.row(0, PROMPTS[0], sampling(temperature=temperature, seed=4, top_logprobs=0))
    planner.prefill(row)
    count = len(row.tokens)
    drafts = [201, 202, 203]
    planner.run([], [], [(row, Draft(drafts))])
    assert (row.tokens[count : count + 3] == drafts) is is_taken
    known = planner.row(1, row.tokens, sampling(prompt_logprobs=0))
    planner.prefill(known)
    reported = known.prompt[-1].logprobs[count - len(row.tokens) - 1 : -1]  # of the tokens behind each
    assert [found[1] for found in row.results[-len(reported) :]] == pytest.approx(list(reported), abs=1e-4)
