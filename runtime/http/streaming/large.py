"""Large answers: written in a worker thread, a row at a time, so that the event loop goes on meanwhile.

The thread gives way to the loop (gil.py) between two rows, but cannot within one call of the JSON encoder:
what is encoded at once must be small. So the parts of an answer that grow with its tokens are `Rows`, which
become JSON row by row. One such answer is written at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import anyio
from anyio.from_thread import check_cancelled
from anyio.lowlevel import RunVar
from anyio.to_thread import run_sync

from runtime.gil import give_way, giving_way
from runtime.http.streaming import sse
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.rows import Rows
from runtime.messages.cost import cost_of, is_free, prompt_length
from runtime.messages.requests import Delta, GenerateRequest
from runtime.messages.sampling import Limits

T = TypeVar("T")

LARGE_ENTRIES = 2048  # log probabilities: some 2 ms of the event loop
MANY_CHOICES = 256  # of an answer in one piece
GROUP = 16  # rows of one piece
NUMBERS = 65_536  # numbers of one piece

_writers: RunVar[anyio.CapacityLimiter] = RunVar("writers")


async def compute(function: Callable[..., T], *args: object) -> T:
    """Calls `function` in the one thread that writes large answers, when it is its turn."""
    try:
        writers = _writers.get()
    except LookupError:
        writers = anyio.CapacityLimiter(1)
        _writers.set(writers)
    return await run_sync(giving_way, function, *args, limiter=writers)


def may_be_large(requests: Sequence[GenerateRequest], limits: Limits) -> bool:
    """Whether the answers together may have more log probabilities than are written on the event loop, or
    hidden states or routed experts."""
    entries = 0
    for request in requests:
        params = request.params
        if is_free(params):
            continue
        if params.reports_tokens:
            return True
        longest = limits.longest if params.max_new_tokens is None else params.max_new_tokens
        entries += cost_of(
            params, prompt_length(request.prompt, limits).most, min(longest, limits.longest), 0
        ).entries
    return entries > LARGE_ENTRIES


def is_large(deltas: Mapping[int, Delta]) -> bool:
    """Whether the events of deltas are written in a thread."""
    entries = 0
    for delta in deltas.values():
        if delta.hidden or delta.experts:
            return True
        for tokens in (delta.logprobs, delta.prompt_logprobs):
            if tokens:
                last = tokens[-1]
                entries += len(tokens) * (1 + len(last.top) + len(last.picked))
    return entries > LARGE_ENTRIES


def encoded(value: object) -> bytes:
    """`value` as JSON; to be called by `compute`. Raises the cancellation of the task that waits for it."""
    return b"".join(_pieces(value))


def give_up(outputs: list[Output]) -> None:
    """Frees the log probabilities of outputs, some at a time."""
    for output in outputs:
        while output.logprobs:
            del output.logprobs[-GROUP:]
            give_way()
    outputs.clear()


def _pieces(value: object) -> Iterator[bytes]:
    match value:
        case Rows(items=items, write=write):
            yield b"["
            for at in range(0, len(items), GROUP):
                check_cancelled()
                give_way()
                rows = [sse.encode(write(item)) for item in items[at : at + GROUP]]
                yield (b"," if at else b"") + b",".join(rows)
            yield b"]"
        case dict():
            for i, (key, part) in enumerate(value.items()):
                yield (b"," if i else b"{") + sse.encode(key) + b":"
                yield from _pieces(part)
            yield b"}" if value else b"{}"
        case [dict() | list() | Rows(), *_]:
            for i, part in enumerate(value):
                yield b"," if i else b"["
                yield from _pieces(part)
            yield b"]"
        case list() if len(value) > NUMBERS:
            for at in range(0, len(value), NUMBERS):
                give_way()
                yield (b"," if at else b"[") + sse.encode(value[at : at + NUMBERS])[1:-1]
            yield b"]"
        case _:
            yield sse.encode(value)
