"""The null device: tokens by the formula, shapes by the rules of StepResult."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from runtime.devices.executor import Executor
from runtime.devices.null.device import DEFAULT_POOL_TOKENS
from runtime.devices.progress import without_progress
from runtime.errors import StartError
from runtime.messages.steps import Admit, Samples, StepPlan, StepResult
from runtime.ranks.open_executor import open_executor
from tests.devices.drive import sampling, start_rank
from tests.devices.plans import decodes, ints, start_null


def opened(rank: int = 0, **device_options: Any) -> Executor:
    return open_executor(rank, start_null(**device_options), without_progress)


def admit(slot: int, prompt_len: int, **params: Any) -> Admit:
    return Admit(slot, sampling(**params), prompt_len, ints())


def run(executor: Executor, plan: StepPlan) -> StepResult:
    result = executor.launch(plan).result()
    assert result is not None and result.step == plan.step
    return result


def mixed(*admits: Admit, targets: tuple[int, ...] = ()) -> StepPlan:
    """A decode in slot 1 at position 9, a prompt of 4 ending in slot 0, and a part of a longer prompt in slot
    2."""
    lengths = {1: 9, 2: 4}
    return StepPlan(
        step=5,
        num_decodes=1,
        admits=[structs.replace(row, length=lengths.get(row.slot, 0)) for row in admits],
        slots=ints(1, 0, 2),
        counts=ints(1, 4, 3),
        samples=np.array([1, 1, 0], np.uint8),
        token_ids=ints(1, 2, 3, 4, 5, 6, 7),
        prompt_targets=ints(*targets),
    )


def prompt(row: Admit) -> StepPlan:
    """A whole prompt of 4 tokens in one slot."""
    return StepPlan(
        step=0,
        num_decodes=0,
        admits=[row],
        slots=ints(row.slot),
        counts=ints(4),
        samples=np.ones(1, np.uint8),
        token_ids=ints(1, 2, 3, 4),
    )


def test_an_answer_depends_on_seed_and_position_only() -> None:
    executor = opened(first_token=100, num_tokens=10)
    result = run(executor, mixed(admit(0, 4, seed=3), admit(1, 8, seed=-1), admit(2, 20)))
    assert result.token_ids.tolist() == [100 + (9 + 10) % 10, 100 + (3 + 4) % 10]
    assert result.token_ids.dtype == np.int32 and result.width == -1 and result.logprobs.size == 0
    alone = opened(first_token=100, num_tokens=10)
    assert run(alone, prompt(admit(5, 4, seed=3))).token_ids.tolist() == result.token_ids[1:].tolist()


@pytest.mark.parametrize("parents", [None, ints(0, 0, 2, 2, 3)], ids=["chain", "tree"])
def test_drafts_are_verified(parents: np.ndarray | None) -> None:
    """Two of the drafts are what comes; with a third after them, which is wrong."""
    executor = opened(first_token=100, num_tokens=10)
    run(executor, prompt(admit(0, 4)))  # 104
    drafts = ints(105, 106, 9, 9, 9) if parents is None else ints(9, 105, 7, 106, 9)
    result = run(
        executor,
        StepPlan(
            step=1,
            num_decodes=0,
            num_verifies=1,
            slots=ints(0),
            counts=ints(6),
            samples=np.array([Samples.ALL], np.uint8),
            token_ids=drafts,
            draft_parents=parents,
        ),
    )
    assert result.token_ids.tolist() == [105, 106, 107]
    assert result.num_tokens is not None and result.num_tokens.tolist() == [3]
    sure = StepPlan(
        step=2,
        num_decodes=0,
        num_verifies=1,
        slots=ints(0),
        counts=ints(3),
        samples=np.array([Samples.LAST], np.uint8),
        token_ids=ints(108, 109),
    )
    assert run(executor, sure).token_ids.tolist() == [100]
    assert run(executor, decodes(3)).token_ids.tolist() == [101]


def test_a_script_begins_with_the_answer_and_repeats() -> None:
    executor = opened(script=[7, 8, 9])
    tokens = run(executor, prompt(admit(0, 4, seed=11))).token_ids.tolist()
    tokens += [run(executor, decodes(step)).token_ids.tolist()[0] for step in range(1, 5)]
    assert tokens == [7, 8, 9, 7, 8]


@pytest.mark.parametrize("vocab,first,num", [(100, 0, 26), (5, 0, 5), (123, 97, 26)])
def test_tokens_stay_in_the_vocabulary(vocab: int, first: int, num: int) -> None:
    executor = opened(vocab_size=vocab)
    tokens = {run(executor, decodes(n)).token_ids.tolist()[0] for n in range(60)}
    assert tokens == set(range(first, first + num))


def test_logprobs_have_the_shapes_that_were_asked_for() -> None:
    executor = opened()
    result = run(
        executor,
        mixed(admit(0, 4, top_logprobs=3), admit(1, 8, top_logprobs=0), admit(2, 20, top_logprobs=9)),
    )
    assert result.width == 3, "the row that samples nothing does not count"
    assert (result.logprobs.size, result.top_ids.size, result.top_logprobs.size) == (2, 6, 6)


def test_prompt_logprobs_follow_the_targets() -> None:
    executor = opened()
    targets = (5, 6, -1)
    result = run(executor, mixed(admit(0, 4), admit(1, 8), admit(2, 20, prompt_logprobs=2), targets=targets))
    assert [(p.slot, p.width, p.top_ids.size, p.top_logprobs.size) for p in result.prompt] == [(2, 2, 6, 6)]
    assert np.isnan(result.prompt[0].logprobs).tolist() == [False, False, True]


def test_only_rank_0_reports() -> None:
    assert opened(rank=1).launch(decodes(0)).result() is None


@pytest.mark.parametrize(
    "max_total_tokens,num_pages",
    [(None, 1 + DEFAULT_POOL_TOKENS // 4), (40, 11), (41, 11), (10**12, 1 + DEFAULT_POOL_TOKENS // 4)],
)
def test_pages_hold_the_tokens_asked_for_and_one_is_padding(
    max_total_tokens: int | None, num_pages: int
) -> None:
    start = start_rank("", device="null", max_total_tokens=max_total_tokens)
    assert open_executor(0, start, without_progress).ready.num_pages == num_pages


def test_time_is_a_model_of_steps_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    result = run(opened(step_s=0.5, token_s=0.25), mixed())
    assert result.compute_s == clock[0] - 100 == 0.5 + 8 * 0.25


@pytest.mark.parametrize(
    "options,message",
    [
        ({"step_ms": 1}, "step_ms"),
        ({"step_s": -1}, "step_s"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"script": [1, 50], "vocab_size": 50}, r"outside 0\.\.49"),
        ({"poison": "burn"}, "poison"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message):
        opened(**options)


def test_it_fails_where_it_is_configured_to() -> None:
    executor = opened(fail_at_step=2)
    run(executor, decodes(1))
    with pytest.raises(RuntimeError, match="step 2"):
        executor.launch(decodes(2)).result()


def test_poison_works_in_a_prompt_and_as_the_last_token() -> None:
    executor = opened(poison_token=3)
    run(executor, decodes(1))
    with pytest.raises(RuntimeError, match="this token"):
        run(executor, prompt(admit(0, 4)))
    executor = opened(poison_token=99)  # c
    run(executor, decodes(0))  # computes a
    run(executor, decodes(1))  # computes b, samples c
    with pytest.raises(RuntimeError, match="this token"):
        run(executor, decodes(2))


def test_torch_is_not_imported() -> None:
    code = "import sys, runtime.ranks.worker, runtime.devices.null.device; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )
