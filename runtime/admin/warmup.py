"""Warm-ups: requests of our own before the server calls itself ready (--warmups), so that the first client
does not wait for what is done once: memory touched for the first time, kernels chosen, a grammar backend
loaded."""

import time
from collections.abc import Callable
from uuid import uuid4

import anyio

from runtime import log
from runtime.errors import OptionsError, RequestError
from runtime.messages.constraint import JsonObject
from runtime.messages.requests import Delta, GenerateRequest, Sink, Tokens
from runtime.messages.sampling import Limits, SamplingParams

Submit = Callable[[GenerateRequest, Sink], None]
TOKEN = 0  # a vocabulary has at least this one


def _generate(limits: Limits) -> tuple[int, SamplingParams]:
    return 1, SamplingParams(max_new_tokens=8, ignore_eos=True)


def _prefill(limits: Limits) -> tuple[int, SamplingParams]:
    return max(1, min(limits.longest_prompt, 8192)), SamplingParams(max_new_tokens=1, temperature=0.0)


def _grammar(limits: Limits) -> tuple[int, SamplingParams]:
    return 1, SamplingParams(max_new_tokens=8, constraint=JsonObject())


# name -> prompt length and parameters
WARMUPS: dict[str, Callable[[Limits], tuple[int, SamplingParams]]] = {
    "generate": _generate,
    "prefill": _prefill,
    "grammar": _grammar,
}


def named(names: str | None) -> list[str]:
    """The names of a list with commas. Raises OptionsError for one that there is not."""
    chosen = [name.strip() for name in (names or "").split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in WARMUPS]:
        raise OptionsError([f"--warmups {unknown[0]} does not exist; there are {', '.join(WARMUPS)}"])
    return chosen


async def warm_up(names: list[str], submit: Submit, limits: Limits) -> None:
    """Runs them one after the other. One that fails is logged: the server serves what it can."""
    for name in names:
        begin = time.monotonic()
        length, params = WARMUPS[name](limits)
        end = End()
        submit(
            GenerateRequest(
                id=f"warmup-{uuid4().hex}",
                prompt=Tokens([TOKEN] * length),
                params=params,
                arrival_s=begin,
                pools=limits.min_new == 0,
            ),
            end,
        )
        await end.event.wait()
        if end.error is not None:
            log.get("start").warning("a warm-up failed", name=name, error=end.error.message)
        else:
            log.get("start").info("warm", name=name, seconds=round(time.monotonic() - begin, 3))


class End:
    """Sink of a warm-up: only how it ends is of interest."""

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.error: RequestError | None = None

    def push(self, delta: Delta) -> None:
        if delta.finish is not None:
            self.event.set()

    def fail(self, error: RequestError) -> None:
        self.error = error
        self.event.set()
