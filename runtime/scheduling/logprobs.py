"""Log probabilities out of a StepResult's flat arrays."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from msgspec import Struct

from runtime.cache.sequence import Sequence as CachedSequence
from runtime.messages.requests import Alternatives, TokenLogprob
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


class PromptTokens(Sequence[TokenLogprob]):
    """The tokens of a prompt with their log probabilities. They are made from the ranks' arrays when they are
    looked at: a prompt may have millions of alternatives, and only the writer of the answer needs them."""

    def __init__(self, first: int, params: SamplingParams) -> None:
        """`first`: the prompt's first token, which has no log probability."""
        self._first = TokenLogprob(first, None, ())
        self._params = params
        self._ends = [1]  # the number of tokens up to each part's end
        self._parts: list[tuple[list[int], PromptLogprobs]] = []

    def add(self, targets: list[int], part: PromptLogprobs) -> None:
        """Appends the log probabilities of the next tokens; copies, as the step's own hold those of others
        too."""
        copied = PromptLogprobs(
            part.slot, part.width, part.logprobs.copy(), part.top_ids.copy(), part.top_logprobs.copy()
        )
        self._parts.append((targets, copied))
        self._ends.append(self._ends[-1] + len(targets))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, at: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, at: slice) -> list[TokenLogprob]: ...

    def __getitem__(self, at: int | slice) -> TokenLogprob | list[TokenLogprob]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        if at == 0:
            return self._first
        number = bisect_right(self._ends, at) - 1
        targets, part = self._parts[number]
        i = at - self._ends[number]
        count, picks = self._params.prompt_logprobs or 0, self._params.logprob_ids
        top = _top(part.top_ids, part.top_logprobs, i, part.width, count, picks)
        return TokenLogprob(targets[i], float(part.logprobs[i]), *top)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class PromptPart(Struct, frozen=True):
    """The prompt log probabilities that one extend row will bring: those of `targets`, to be added to
    `collected`."""

    sequence: CachedSequence
    targets: list[int]
    is_last: bool
    collected: PromptTokens


class PromptCollector:
    """Puts the prompt's log probabilities together, chunk by chunk, for sequences that asked for them."""

    def __init__(self) -> None:
        self._collected: dict[int, PromptTokens] = {}  # by sequence id

    def expect(self, sequence: CachedSequence, start: int, count: int) -> PromptPart:
        """The next `count` tokens of the prompt are planned."""
        collected = self._collected.get(sequence.id)
        if collected is None:
            collected = PromptTokens(sequence.text_ids(0, 1)[0], sequence.request.params)
            self._collected[sequence.id] = collected
        targets = sequence.text_ids(start + 1, start + count + 1).tolist()
        return PromptPart(sequence, targets, start + count == sequence.prompt_len, collected)

    def drop(self, sequence: CachedSequence) -> None:
        """The sequence ended, or starts over: what is still in flight for it counts no more."""
        self._collected.pop(sequence.id, None)

    def clear(self) -> None:
        """The ranks died: prompts that are not complete are computed again, from their first token."""
        self._collected.clear()

    def take(
        self, parts: list[PromptLogprobs], expected: dict[int, PromptPart]
    ) -> dict[int, Sequence[TokenLogprob]]:
        """A step's parts, expected by slot. -> the prompts that are complete now, by sequence id"""
        complete: dict[int, Sequence[TokenLogprob]] = {}
        for part in parts:
            plan = expected[part.slot]
            plan.collected.add(plan.targets, part)
            if plan.is_last and self._collected.get(plan.sequence.id) is plan.collected:
                complete[plan.sequence.id] = self._collected.pop(plan.sequence.id)
        return complete


def _top(
    ids: np.ndarray, values: np.ndarray, row: int, width: int, count: int, picks: tuple[int, ...]
) -> Iterator[Sequence[tuple[int, float]]]:
    """The likeliest tokens of a row, then those that were asked for by name: they stand behind the others."""
    start = row * width
    stop = start + min(count, width)
    yield Alternatives(ids[start:stop].tobytes(), values[start:stop].tobytes()) if stop > start else ()
    if picks:
        yield Alternatives(array("i", picks).tobytes(), values[stop : stop + len(picks)].tobytes())
