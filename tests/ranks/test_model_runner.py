"""When the host waits for a step that the device still computes: for nothing but tokens that are
needed on the host."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from runtime.messages.sampling import Processor
from runtime.messages.steps import StepResult
from runtime.ranks.model_runner import Launched
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make import make_checkpoint


class Noted:
    """A logit processor that follows its sequence, and always chooses the token after the last one."""

    def __init__(self, params: dict[str, Any]) -> None:
        return None

    def __call__(self, tokens: list[int], prompt_len: int, logits: Tensor) -> Tensor:
        return logits.fill_(-1.0).index_fill_(0, logits.new_tensor([tokens[-1] + 1]).long(), 5.0)


class Slow:
    """Transfers of a device that is always behind: what was fetched has come when it is waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.fetches = 0

    def fetch(self, tensors: Sequence[Tensor]) -> "Coming":
        self.fetches += 1
        return Coming(self, self.fetches, [tensor.numpy().copy() for tensor in tensors])


class Coming:
    def __init__(self, slow: Slow, number: int, arrays: list[np.ndarray]) -> None:
        self.slow, self.number, self.found = slow, number, arrays

    def is_done(self) -> bool:
        return self.number in self.slow.waited

    def arrays(self) -> list[np.ndarray]:
        self.slow.waited.append(self.number)
        return self.found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def opened(folder: Path) -> tuple[Planner, Slow]:
    executor, ready = start(folder, processors=[f"{__name__}:Noted"])
    slow = executor.runner.transfers = Slow()  # type: ignore[attr-defined]
    return Planner(executor, ready, 4), slow


def launch(planner: Planner, decodes: list[Row], extends: list[tuple[Row, int]]) -> Launched:
    pending = planner.executor.launch(planner.plan(decodes, extends))
    assert isinstance(pending, Launched)
    return pending


def decode(planner: Planner, row: Row) -> Launched:
    """One step of a row whose last token is not known on the host yet."""
    row.tokens.append(-1)
    return launch(planner, [row], [])


def test_steps_are_launched_without_results(folder: Path) -> None:
    expected_planner, _ = opened(folder)
    expected = expected_planner.generate(expected_planner.row(0, [5, 6, 7], sampling()), 5)
    planner, slow = opened(folder)
    row = planner.row(0, [5, 6, 7], sampling())
    steps = [launch(planner, [], [(row, 3)]), *(decode(planner, row) for _ in range(4))]
    assert slow.waited == [] and not any(step.is_done() for step in steps)
    assert [step.result().token_ids.tolist() for step in steps] == [[token] for token in expected]
    assert slow.waited == [1, 2, 3, 4, 5] and all(step.result() is step.result() for step in steps), (
        "waited for once"
    )


def test_who_must_be_informed_is_informed_before_the_next_token(folder: Path) -> None:
    planner, slow = opened(folder)
    followed = planner.row(0, [5, 6, 7], sampling(processor=Processor("Noted", {})))
    steps = [launch(planner, [], [(followed, 3)])]
    for n in range(3):
        steps.append(decode(planner, followed))
        assert slow.waited == list(range(1, n + 2)), "for the step before, and not for this one"
    assert [step.result().token_ids.tolist() for step in steps] == [[8], [9], [10], [11]]


def test_a_slot_changes_hands_when_its_last_token_has_been_reported(folder: Path) -> None:
    planner, slow = opened(folder)
    params = sampling(processor=Processor("Noted", {}))
    first = launch(planner, [], [(planner.row(0, [5, 6, 7], params), 3)])
    second = launch(planner, [], [(planner.row(0, [50, 51], params), 2)])
    assert slow.waited == [1]
    results: list[StepResult] = [first.result(), second.result()]
    assert [result.token_ids.tolist() for result in results] == [[8], [52]]
    loaded = planner.executor.runner  # type: ignore[attr-defined]
    assert loaded.slots.processors.slots[0].tokens == [50, 51, 52]
