"""Warm-ups: requests of the server itself before it is ready (--warmups), so that the first client does not
wait for work that is done once: memory touched for the first time, kernels selected, a grammar backend
loaded."""

import time
from collections.abc import Callable
from uuid import uuid4

import anyio

from runtime import log
from runtime.admin.start_progress import StartProgress
from runtime.errors import OptionsError, RequestError
from runtime.messages.constraint import JsonObject
from runtime.messages.requests import Delta, GenerateRequest, Sink, Tokens
from runtime.messages.sampling import Limits, SamplingParams

Submit = Callable[[GenerateRequest, Sink], None]
TOKEN = 0  # every vocabulary has this token


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


def parse(warmups: str | None) -> list[str]:
    """Names out of --warmups, a list with commas. Raises OptionsError for an unknown name."""
    names = [name.strip() for name in (warmups or "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in WARMUPS]:
        raise OptionsError([f"--warmups {unknown[0]} does not exist; there are {', '.join(WARMUPS)}"])
    return names


async def run(names: list[str], submit: Submit, limits: Limits, progress: StartProgress) -> None:
    """Runs warm-ups one after the other. One that fails is logged, and the server serves all the same."""
    for done, name in enumerate(names):
        progress.update("warm-up", done, len(names))
        begin = time.monotonic()
        length, params = WARMUPS[name](limits)
        end = EndSink()
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


class EndSink:
    """Sink that notes only how a request ends."""

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.error: RequestError | None = None

    def push(self, delta: Delta) -> None:
        """Sets the event at the last delta."""
        if delta.finish is not None:
            self.event.set()

    def fail(self, error: RequestError) -> None:
        """Keeps the error and sets the event."""
        self.error = error
        self.event.set()
