"""Logit processors: named classes that requests choose."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.errors import StartError
from runtime.layers.sampling.processors import Processors
from runtime.messages.sampling import Processor
from runtime.messages.steps import Admit, SlotSampling

HERE = "tests.layers.sampling.test_processors"


class Only:
    """Nothing but the token that `params` names, and after it the next one."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.first = int(params["first"])

    def __call__(self, tokens: list[int], prompt_len: int, logits: Tensor) -> Tensor:
        logits.fill_(-float("inf"))
        logits[self.first + len(tokens) - prompt_len] = 1.0
        return logits


class Angry:
    """Raises at its second token."""

    def __init__(self, params: dict[str, Any]) -> None:
        pass

    def __call__(self, tokens: list[int], prompt_len: int, logits: Tensor) -> Tensor:
        if len(tokens) > prompt_len:
            raise RuntimeError("enough")
        return logits


def admit(slot: int, name: str | None, *history: int, **params: Any) -> Admit:
    sampling = SlotSampling(
        temperature=0,
        top_p=1,
        top_k=0,
        min_p=0,
        frequency_penalty=0,
        presence_penalty=0,
        repetition_penalty=1,
        seed=0,
        bias_ids=[],
        bias_values=[],
        stop_ids=[],
        min_len=0,
        top_logprobs=-1,
        prompt_logprobs=-1,
        processor=None if name is None else Processor(name, params),
    )
    return Admit(slot, sampling, 2, np.array(history, np.int32))


def test_a_slot_sees_its_own_tokens_and_others_nothing() -> None:
    processors = Processors([f"{HERE}:Only", f"{HERE}:Angry"])
    processors.admit(admit(0, None))
    processors.admit(admit(1, "Only", 8, 9, first=3))
    logits = torch.zeros(2, 10)
    logits[0, 7] = 2.0
    changed = processors.apply(logits, [0, 1], {}, is_own=False)
    assert changed.argmax(dim=1).tolist() == [7, 3] and not logits[1].any(), (
        "the model's own logits stay for log probabilities"
    )
    assert bool(changed.isfinite().all())
    assert processors.took([0, 1], [[7], [3]]) == []
    assert processors.apply(logits.flip(0), [1, 0], {}, is_own=False).argmax(dim=1).tolist() == [4, 7]
    # it gave way, and came back with what it had generated
    processors.admit(admit(1, "Only", 8, 9, 3, 4, 5, first=3))
    assert processors.apply(logits[:1], [1], {}, is_own=False).argmax(dim=1).tolist() == [6]
    processors.admit(admit(1, None))
    assert processors.apply(logits, [1], {}, is_own=False) is logits


def test_what_raises_fails_alone(capsys: pytest.CaptureFixture[str]) -> None:
    processors = Processors([f"{HERE}:Only", f"{HERE}:Angry"])
    processors.admit(admit(0, "Angry", 8, 9))
    processors.admit(admit(1, "Only", 8, 9, nothing=3))  # does not take these parameters
    processors.admit(admit(2, "Only", 8, 9, first=1))
    logits = torch.zeros(3, 10)
    processors.apply(logits, [0, 1, 2], {}, is_own=False)
    assert processors.took([0, 1, 2], [[0], [0], [1]]) == [1]
    changed = processors.apply(logits, [2, 0], {}, is_own=True)
    assert changed is logits and changed[0].argmax() == 2
    assert processors.took([2, 0], [[2], [0]]) == [1]


@pytest.mark.parametrize("index", ["no.such.module:X", f"{HERE}:Nothing", "tests.layers", f"{HERE}:"])
def test_a_place_that_holds_no_class(index: str) -> None:
    with pytest.raises(StartError, match="--logit-processors"):
        Processors([index])
