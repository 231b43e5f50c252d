"""Merges deltas that come faster than the client wants them or can take them."""

from collections.abc import Callable
from typing import TypeVar

from runtime.messages.requests import Delta

T = TypeVar("T")
Take = Callable[[int, Delta], None]  # gets a delta with the number of its choice, counted over all prompts


def merged(first: Delta, second: Delta) -> Delta:
    """Two deltas of one sequence as one."""
    return Delta(
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=joined(first.logprobs, second.logprobs),
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        finish=second.finish,
        prompt_tokens=first.prompt_tokens or second.prompt_tokens,
        cached_tokens=first.cached_tokens or second.cached_tokens,
        loaded=first.loaded if first.cached_tokens else second.loaded,
        prompt_ids=first.prompt_ids or second.prompt_ids,
        events=joined(first.events, second.events),
        reasoning_tokens=first.reasoning_tokens + second.reasoning_tokens,
        hidden=joined(first.hidden, second.hidden),
        experts=second.experts,
    )


def joined(first: list[T] | None, second: list[T] | None) -> list[T] | None:
    """Both lists as one; None is an empty list."""
    return first + second if first and second else first or second


class Pace:
    """Passes on a choice's first and last delta at once, and the others merged, `interval` tokens at a
    time."""

    def __init__(self, take: Take, interval: int) -> None:
        self.take = take
        self.interval = interval
        self.merged: dict[int, Delta] = {}  # deltas not passed on yet, by choice

    def __call__(self, choice: int, delta: Delta) -> None:
        before = self.merged.get(choice)
        if before is not None:
            delta = merged(before, delta)
        if before is None or delta.finish is not None or len(delta.token_ids) >= self.interval:
            self.take(choice, delta)
            delta = Delta(delta.index, "", [])
        self.merged[choice] = delta
