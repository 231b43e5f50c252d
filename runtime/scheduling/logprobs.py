"""Log probabilities out of a StepResult's flat arrays."""

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from runtime.cache.sequence import Sequence
from runtime.messages.requests import TokenLogprob
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import PromptLogprobs, StepResult


def of_tokens(result: StepResult, first: int, count: int, params: SamplingParams) -> list[TokenLogprob]:
    """The result's tokens `first` .. `first + count - 1` with the alternatives that `params` ask for."""
    return [
        TokenLogprob(
            int(result.token_ids[at]),
            float(result.logprobs[at]),
            *_top(
                result.top_ids, result.top_logprobs, at, result.width, params.top_logprobs, params.logprob_ids
            ),
        )
        for at in range(first, first + count)
    ]


class PromptPart(Struct, frozen=True):
    """The prompt log probabilities that one extend row will bring: those of `targets`, to be added to
    `collected`."""

    sequence: Sequence
    targets: list[int]
    is_last: bool
    collected: list[TokenLogprob]


class PromptCollector:
    """Puts the prompt's log probabilities together, chunk by chunk, for sequences that asked for them."""

    def __init__(self) -> None:
        self._collected: dict[int, list[TokenLogprob]] = {}  # by sequence id

    def expect(self, sequence: Sequence, start: int, count: int) -> PromptPart:
        """The next `count` tokens of the prompt are planned."""
        collected = self._collected.setdefault(sequence.id, [TokenLogprob(sequence.tokens[0], None, [])])
        targets = sequence.tokens[start + 1 : start + count + 1].tolist()
        return PromptPart(sequence, targets, start + count == sequence.prompt_len, collected)

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended, or starts over: what is still in flight for it counts no more."""
        self._collected.pop(sequence.id, None)

    def clear(self) -> None:
        """The ranks died: prompts that are not complete are computed again, from their first token."""
        self._collected.clear()

    def take(
        self, parts: list[PromptLogprobs], expected: dict[int, PromptPart]
    ) -> dict[int, list[TokenLogprob]]:
        """A step's parts, expected by slot. -> the prompts that are complete now, by sequence id"""
        complete: dict[int, list[TokenLogprob]] = {}
        for part in parts:
            plan = expected[part.slot]
            sequence = plan.sequence
            params = sequence.request.params
            count, picks = params.prompt_logprobs or 0, params.logprob_ids
            plan.collected.extend(
                TokenLogprob(
                    token,
                    float(part.logprobs[i]),
                    *_top(part.top_ids, part.top_logprobs, i, part.width, count, picks),
                )
                for i, token in enumerate(plan.targets)
            )
            if plan.is_last and self._collected.get(sequence.id) is plan.collected:
                complete[sequence.id] = self._collected.pop(sequence.id)
        return complete


def _top(
    ids: np.ndarray, values: np.ndarray, row: int, width: int, count: int, picks: tuple[int, ...]
) -> Iterator[list[tuple[int, float]]]:
    """The likeliest tokens of a row, then those that were asked for by name: they stand behind the others."""
    start = row * width
    stop = start + min(count, width)
    yield list(zip(ids[start:stop].tolist(), values[start:stop].tolist(), strict=True))
    if picks:
        yield list(zip(picks, values[stop : stop + len(picks)].tolist(), strict=True))
