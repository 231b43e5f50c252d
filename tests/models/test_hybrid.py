"""Families with recurrent layers against transformers, greedy, token for token: in company, in chunks that
end anywhere, from kept states, with forced drafts, and through graphs."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.ranks.open_executor import DEVICES
from runtime.scheduling.drafts import Draft
from tests.devices import taped
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.hybrids import HYBRIDS
from tests.models.make import VOCAB_SIZE, make_checkpoint
from tests.models.reference import Reference

NUM_TOKENS = 16
# what differs from the sizes of make.py
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in HYBRIDS},
    "mamba2 one group, biases, limits": (
        "mamba2",
        {"n_groups": 1, "use_bias": True, "conv_kernel": 2, "tie_word_embeddings": True},
    ),
}


def prompts() -> list[list[int]]:
    """One of them is longer than a chunk of the scan."""
    random = np.random.default_rng(7)
    return [random.integers(0, VOCAB_SIZE, size).tolist() for size in (1, 9, 70, 41)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def checkpoint(case: str) -> tuple[Path, Reference, list[list[int]]]:
        family, overrides = CASES[case]
        folder = make_checkpoint(family, tmp_path_factory.mktemp("model"), **overrides)
        reference = Reference(folder)
        return folder, reference, [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts()]

    return checkpoint


def in_company(planner: Planner, chunk: int) -> list[list[int]]:
    """Sequences join while others decode, so most steps mix decode and extend rows."""
    rows = [planner.row(slot, prompt, sampling()) for slot, prompt in enumerate(prompts())]
    waiting, running = list(rows), []
    while waiting or any(len(row.tokens) < row.prompt_len + NUM_TOKENS for row in running):
        head = waiting[0] if waiting else None
        count = min(chunk, head.prompt_len - head.computed) if head else 0
        decodes = [row for row in running if len(row.tokens) < row.prompt_len + NUM_TOKENS]
        planner.run(decodes, [(head, count)] if head else [])
        if head and head.computed == head.prompt_len:
            running.append(waiting.pop(0))
    return [row.tokens[row.prompt_len :] for row in rows]


@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_transformers_in_company(case: str, checkpoints: Any) -> None:
    """Twice on one rank: slots and states that others had are taken anew."""
    folder, _, expected = checkpoints(case)
    executor, ready = start(folder, num_states=12)
    assert ready.num_state_slots == 13
    for chunk in (1000, 7):
        assert in_company(Planner(executor, ready, 4), chunk) == expected


@pytest.mark.parametrize("family", HYBRIDS)
def test_captured_decode_steps(family: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through graphs with padding, next to steps that no graph has."""
    monkeypatch.setitem(DEVICES, "taped", taped.__name__)
    folder, _, expected = checkpoints(family)
    executor, ready = start(folder, num_states=12, device="taped", graph_sizes=[2, 4], max_len=128)
    assert in_company(Planner(executor, ready, 4), 13) == expected
    assert executor.tapes.replays > 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", HYBRIDS)
def test_prefix_at_a_kept_state(family: str, checkpoints: Any) -> None:
    """A sequence continues from a state that a step has kept, while the first one goes on."""
    folder, reference, expected = checkpoints(family)
    executor, ready = start(folder, num_states=12)
    planner = Planner(executor, ready, 4)
    first = planner.row(0, prompts()[3], sampling())
    planner.keeps = [(1, 9)]  # the state of slot 0, behind its first 20 tokens
    planner.run([], [(first, 20)])
    planner.run([], [(first, first.prompt_len - 20)])
    other = prompts()[3][:20] + [5, 6, 7]
    second = planner.row(1, other, sampling(), prefix=first, shared=20, state_from=9)
    planner.run([first], [(second, len(other) - 20)])
    while len(first.tokens) < first.prompt_len + NUM_TOKENS:
        planner.run([first, second], [])
    assert first.tokens[first.prompt_len :] == expected[3]
    assert second.tokens[len(other) :] == reference.greedy(other, len(second.tokens) - len(other))


@pytest.mark.parametrize("family", HYBRIDS)
def test_forced_drafts(family: str, checkpoints: Any) -> None:
    """Tokens that a grammar forces are computed as one row, next to rows that decode and extend."""
    folder, reference, expected = checkpoints(family)
    executor, ready = start(folder, num_states=12)
    planner = Planner(executor, ready, 4)
    rows: list[Row] = [planner.row(slot, prompts()[slot], sampling()) for slot in (1, 3)]
    for row in rows:
        planner.prefill(row)
    forced = [11, 12, 13, 14, 15]
    late = planner.row(0, prompts()[2], sampling())
    planner.run([rows[0]], [(late, 33)], [(rows[1], Draft(forced, is_sure=True))])
    planner.run([rows[0], rows[1]], [(late, late.prompt_len - 33)])
    while len(rows[0].tokens) < rows[0].prompt_len + NUM_TOKENS:
        planner.run([*rows, late], [])
    known = [*prompts()[3], expected[3][0], *forced]
    assert rows[0].tokens[rows[0].prompt_len :] == expected[1]
    assert rows[1].tokens == known + reference.greedy(known, len(rows[1].tokens) - len(known))
    assert late.tokens[late.prompt_len :] == expected[2][: len(late.tokens) - late.prompt_len]
