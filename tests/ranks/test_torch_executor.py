"""What the Executor of torch devices promises beyond the right tokens: pages, slots, results, isolation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.cache.pool_sizes import Pools
from runtime.devices.executor import Executor
from runtime.devices.progress import without_progress
from runtime.errors import StartError
from runtime.messages.ranks import RankReady
from runtime.messages.requests import TokenBans
from runtime.ranks.open_executor import open_executor
from runtime.ranks.start import count_pages
from runtime.text.token_bans import packed
from tests.devices.drive import Planner, sampling, start, start_rank
from tests.models.make import VOCAB_SIZE, make_checkpoint

PROMPT = [5, 9, 100, 7, 7, 31]
# of 100 allowed tokens, only those follow each other of which one is even and one odd
PARITY = TokenBans(
    packed(tuple(range(5, 105))), tuple((a, b) for a in range(5, 105) for b in range(5 + (a + 5) % 2, 105, 2))
)
SAMPLING_PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0, "seed": 3},
    "nucleus": {"temperature": 0.9, "top_p": 0.8, "seed": -(2**63)},
    "top_k": {"temperature": 1.5, "top_k": 5, "min_p": 0.02, "seed": 2**63 - 1},
    "penalties": {
        "temperature": 0.7,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 1,
    },
    "bias": {"bias_ids": [3, 4], "bias_values": [2.5, -100.0]},
    "banned": {"stop_ids": list(range(100)), "min_len": 14},
    "token_bans": {"temperature": 1.0, "seed": 4, "token_bans": PARITY},
}
EXTREME: list[dict[str, Any]] = [
    {"temperature": 1e-300, "seed": 1},
    {"temperature": 1e-6, "top_p": 1e-9},
    {"temperature": 100.0, "top_k": 2**31 - 1, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1e-30},
    {"temperature": 1.0, "repetition_penalty": 10.0},
    {"stop_ids": list(range(VOCAB_SIZE)), "min_len": 10**6},
    {"temperature": 1.0, "stop_ids": list(range(VOCAB_SIZE)), "min_len": 10**6},
    {"temperature": 1.0, "bias_ids": list(range(VOCAB_SIZE)), "bias_values": [-1000.0] * VOCAB_SIZE},
    {"top_logprobs": VOCAB_SIZE, "prompt_logprobs": VOCAB_SIZE},
    {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    {"token_bans": TokenBans(packed((3,)), ((3,), (3, 3)))},
    {"temperature": 1e-300, "token_bans": TokenBans(packed((3, 4)), ((3,),)), "stop_ids": [4], "min_len": 99},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture
def rank(folder: Path) -> tuple[Executor, RankReady]:
    return start(folder, max_slots=16)


@pytest.mark.parametrize("name", SAMPLING_PARAMS)
def test_tokens_do_not_depend_on_company(name: str, rank: tuple[Executor, RankReady]) -> None:
    """A sequence gets the same tokens alone and in a batch, in another slot."""
    planner = Planner(*rank, 4)
    alone = planner.generate(planner.row(0, PROMPT, sampling(**SAMPLING_PARAMS[name])), 12)
    rows = [
        planner.row(slot + 1, PROMPT, sampling(**params))
        for slot, params in enumerate(SAMPLING_PARAMS.values())
    ]
    for i, row in enumerate(rows):
        planner.run(rows[:i], [(row, len(PROMPT))])
    for _ in range(12):
        planner.run(rows, [])
    assert rows[list(SAMPLING_PARAMS).index(name)].tokens[len(PROMPT) :][:12] == alone


@pytest.mark.parametrize("name", SAMPLING_PARAMS)
def test_tokens_survive_preemption(name: str, rank: tuple[Executor, RankReady]) -> None:
    """Half-way, the sequence loses its pages and is admitted anew, elsewhere, with all its tokens."""
    planner = Planner(*rank, 4)
    whole = planner.generate(planner.row(0, PROMPT, sampling(**SAMPLING_PARAMS[name])), 12)
    again = planner.row(7, PROMPT + whole[:5], sampling(**SAMPLING_PARAMS[name]))
    again.prompt_len = len(PROMPT)
    planner.prefill(again, chunk=4)
    while len(again.tokens) < len(PROMPT) + 12:
        planner.run([again], [])
    assert again.tokens[len(PROMPT) :] == whole


def test_min_len_bans_stop_ids(rank: tuple[Executor, RankReady]) -> None:
    planner = Planner(*rank, 4)
    row = planner.row(
        0, PROMPT, sampling(temperature=5.0, stop_ids=list(range(200)), min_len=len(PROMPT) + 8)
    )
    tokens = planner.generate(row, 40)
    assert all(token >= 200 for token in tokens[:8]) and any(token < 200 for token in tokens[8:])


def test_token_bans_hold_for_each_token(rank: tuple[Executor, RankReady]) -> None:
    planner = Planner(*rank, 4)
    tokens = planner.generate(planner.row(0, PROMPT, sampling(**SAMPLING_PARAMS["token_bans"])), 40)
    assert all(5 <= token < 105 for token in tokens)
    assert all((a + b) % 2 for a, b in zip(tokens, tokens[1:], strict=False))


@pytest.mark.parametrize("params", EXTREME, ids=str)
def test_extreme_params_give_tokens(params: dict[str, Any], rank: tuple[Executor, RankReady]) -> None:
    planner = Planner(*rank, 4)
    row = planner.row(0, PROMPT, sampling(**params))
    company = planner.row(1, PROMPT, sampling())
    expected = planner.generate(planner.row(2, PROMPT, sampling()), 6)
    planner.run([], [(row, len(PROMPT)), (company, len(PROMPT))])
    for _ in range(5):
        planner.run([row, company], [])
    assert all(0 <= token < VOCAB_SIZE for token in row.tokens)
    assert company.tokens[len(PROMPT) :] == expected


def test_non_finite_values_harm_no_other_request(rank: tuple[Executor, RankReady]) -> None:
    """A sequence whose keys and values became NaN leaves its pages; who gets them next never sees it."""
    executor, ready = rank
    planner = Planner(executor, ready, 4)
    expected = planner.generate(planner.row(0, PROMPT, sampling()), 10)
    for k, v in executor.runner.kv:  # type: ignore[attr-defined]
        k[4:].fill_(torch.nan)
        v[4:].fill_(torch.nan)
    rows = [planner.row(slot, PROMPT[: 6 - slot], sampling()) for slot in range(3)]
    for row in rows:
        planner.prefill(row)
    for _ in range(9):
        planner.run(rows, [])
    assert rows[0].tokens[len(PROMPT) :] == expected


def test_steps_without_samples_and_wide_logprobs(rank: tuple[Executor, RankReady]) -> None:
    planner = Planner(*rank, 4)
    row = planner.row(0, PROMPT, sampling(top_logprobs=2))
    other = planner.row(1, PROMPT, sampling())
    first = planner.run([], [(row, 3)])
    assert first is not None and len(first.token_ids) == 0 and first.width == -1 and first.step == 1
    second = planner.run([], [(row, 3), (other, 6)])
    assert second is not None and second.width == 2 and second.token_ids.dtype == np.int32
    assert (second.logprobs.shape, second.top_ids.shape, second.top_logprobs.shape) == ((2,), (4,), (4,))
    assert (
        second.logprobs.dtype == second.top_logprobs.dtype == np.float32 and second.top_ids.dtype == np.int32
    )
    third = planner.run([other], [])
    assert third is not None and third.width == -1 and len(third.logprobs) == 0


@pytest.mark.parametrize(
    ("options", "budget", "expected"),
    [
        ({"max_slots": 2, "max_len": 10}, 10**9, 2 * 3 + 1),  # never more than can be used
        ({"max_slots": 100, "max_len": 1000, "max_total_tokens": 50}, 10**9, 12 + 1),
        ({"max_slots": 100, "max_len": 1000}, 4 * 100 * 8 + 399, 8),  # 8 pages of 4 tokens of 100 bytes
    ],
)
def test_count_pages(options: dict[str, Any], budget: int, expected: int) -> None:
    assert count_pages(start_rank("", **options), (0, 0), budget, (100, 0)) == Pools(expected - 1)


def test_count_pages_refuses() -> None:
    with pytest.raises(StartError, match="--mem-fraction-static"):
        count_pages(start_rank(""), (0,), 4 * 100, (100, 0))
    with pytest.raises(StartError, match="--mem-fraction-static"):  # ten pages, but a window takes eleven
        count_pages(start_rank("", window_ratio=0.5), (37,), 4 * 100 * 11, (0, 100))


def test_ready_says_what_was_taken(rank: tuple[Executor, RankReady]) -> None:
    executor, ready = rank
    assert ready.num_pages == 16 * 256 // 4 + 1
    kv = executor.runner.kv  # type: ignore[attr-defined]
    assert ready.pages_bytes == sum(keys.nbytes + values.nbytes for keys, values in kv)
    assert set(ready.phases_s) == {"device", "weights", "pages"} and ready.device_name == "cpu"
    executor.close()
    executor.close()


def test_unknown_device() -> None:
    with pytest.raises(StartError, match="cpu"):
        open_executor(0, start_rank("", device="tpu"), without_progress)
