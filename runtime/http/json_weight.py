"""What a JSON body costs to decode: its size says little, its number of values much.

The decoder makes one object after the other, and no other thread runs Python meanwhile: sixteen
megabytes of text take five milliseconds, of empty lists four seconds. So large bodies are weighed before they
are decoded, in a worker thread and with numpy, which lets the event loop go on.
"""

import anyio
import numpy as np
from anyio.lowlevel import RunVar
from anyio.to_thread import run_sync

from runtime.errors import TooLarge
from runtime.gil import give_way, giving_way
from runtime.http.cut_body import MIN_BYTES, CutBody, cut, uncut
from runtime.memory_file import MemoryFile

UNWEIGHED_BYTES = 64 * 1024  # decoded in three milliseconds at most
BLOCK_BYTES = 64 * 1024  # some of numpy's calls hold the interpreter: for 0.1 ms
PART_BYTES = 256 * 1024  # copied by one call
# a body may always weigh so much, which is decoded in some 30 ms, and more with a larger --max-body-bytes
MIN_WEIGHT = 2**20
BYTES_PER_UNIT = 16
QUOTE, BACKSLASH = ord('"'), ord("\\")
STRING = 3  # weight of a string; a number weighs 1, as the comma before the next one
WEIGHTS = np.zeros(256, np.uint8)
WEIGHTS[[ord(","), ord(":"), ord("["), ord("{")]] = 1, 2, 4, 4

_scales: RunVar[anyio.CapacityLimiter] = RunVar("scales")


async def check_weight(body: bytes, max_body_bytes: int) -> None:
    """Raises TooLarge for a body that has more values than may be decoded at once."""
    if len(body) > UNWEIGHED_BYTES:
        weight = await run_sync(giving_way, weight_of, body, limiter=_limiter())
        check_weight_now(weight, max_body_bytes)


async def joined_body(body: list[bytes] | MemoryFile, max_body_bytes: int) -> CutBody:
    """A body that was collected in memory, or that came in parts, which are given up. Raises TooLarge for one
    that has more values than may be decoded at once; Unavailable. A large body is joined in a worker thread,
    too: most of its megabytes are memory that the system has yet to make."""
    if isinstance(body, list) and sum(map(len, body)) <= UNWEIGHED_BYTES:
        return uncut(b"".join(body))
    joined, weight = await run_sync(giving_way, _joined_and_weighed, body, limiter=_limiter())
    check_weight_now(weight, max_body_bytes)
    return joined


def _joined_and_weighed(body: list[bytes] | MemoryFile) -> tuple[CutBody, int]:
    if isinstance(body, list) and sum(map(len, body)) < MIN_BYTES:
        joined = uncut(b"".join(body))
        body.clear()
    else:
        joined = cut(_collected(body) if isinstance(body, list) else body)
    return joined, weight_of(joined.content)  # a string weighs the same, whatever its length


def _collected(parts: list[bytes]) -> MemoryFile:
    memory = MemoryFile()
    while parts:
        part = memoryview(parts.pop(0))
        for at in range(0, len(part), PART_BYTES):
            memory.append(part[at : at + PART_BYTES])
            give_way()
    return memory


def _limiter() -> anyio.CapacityLimiter:
    """Weighs one body at a time, so large bodies are also decoded some time apart."""
    try:
        return _scales.get()
    except LookupError:
        scales = anyio.CapacityLimiter(1)
        _scales.set(scales)
        return scales


def check_weight_now(weight: int, max_body_bytes: int) -> None:
    """Raises TooLarge for a weight above what `max_body_bytes` allow."""
    most = most_weight(max_body_bytes)
    if weight > most:
        raise TooLarge(
            f"the body has too many JSON values: they weigh {weight} (number 1, text 4, list or object 5, "
            f"key 3 more), and this server takes {most} (more with a larger --max-body-bytes); send fewer "
            "at once"
        )


def most_weight(max_body_bytes: int) -> int:
    """The largest weight that may be decoded at once."""
    return max(MIN_WEIGHT, max_body_bytes // BYTES_PER_UNIT)


def weight_of(body: bytes) -> int:
    """The weight of the values of a JSON text."""
    weight, num_quotes, at = 0, 0, 0
    while at < len(body):
        end = _end_of_block(body, at)
        block = body[at:end]
        if b"\\" in block:
            block = block.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
        text = np.frombuffer(block, np.uint8)
        quotes = text == QUOTE
        inside = np.cumsum(quotes, dtype=np.uint8)
        inside += np.uint8(num_quotes & 1)
        inside &= 1
        num_quotes += int(np.count_nonzero(quotes))
        units = WEIGHTS.take(text)
        units *= 1 - inside
        weight += int(units.sum(dtype=np.int64))
        at = end
        give_way()
    return weight + STRING * (num_quotes // 2)


def _end_of_block(body: bytes, at: int) -> int:
    """The end of the block that begins at `at`: never between a backslash and what it escapes."""
    end = min(at + BLOCK_BYTES, len(body))
    first = end
    while first > at and body[first - 1] == BACKSLASH:
        first -= 1
    return min(end + (end - first) % 2, len(body))
