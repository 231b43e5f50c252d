"""Bodies with files in them: the base64 is taken out before the JSON is decoded.

A picture of 3840 x 2160 is some three megabytes of base64. The decoder would look at each character of it and
copy it, and the event loop would wait for that. So a large body is collected in memory without a name. A
worker thread finds such texts there, and leaves a mark in place of each that clients cannot guess. What is
decoded as JSON is small, and the files stay where they came: a process that decodes them reads them there.

A mark that turns up anywhere but as a file of the request was a text of another kind; then the body is
decoded as it came.
"""

import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from msgspec import Struct, structs

from runtime.errors import RequestError
from runtime.gil import give_way
from runtime.memory_file import MemoryFile
from runtime.messages.media import EncodedText, MediaSource
from runtime.messages.requests import GenerateRequest

T = TypeVar("T")

MIN_BYTES = 1 << 18  # of a text that is taken out
BLOCK_BYTES = 1 << 16  # looked at between two pauses
MAX_HEAD_BYTES = 256  # of a data: URL before its base64
_HEAD = b"data:"
_LOWEST, _HIGHEST = ord("+"), ord("z")  # of the characters of base64
_OF_JSON = (b",", b":", b"\\")  # between these


class CutBody(Struct, frozen=True):
    """A body, and the same with marks in place of the base64 in it."""

    content: bytes  # all of the body, where nothing was taken out
    texts: Mapping[str, EncodedText]  # the part of `memory` that each mark stands for
    memory: MemoryFile | None = None  # the body as it came; None: `content` is

    @property
    def whole(self) -> bytes:
        """The body as it came."""
        return self.content if self.memory is None else self.memory.read(0, self.memory.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the body as it came."""
        return len(self.content) if self.memory is None else self.memory.num_bytes


def uncut(body: bytes) -> CutBody:
    """A body that is decoded as it came."""
    return CutBody(body, {})


def cut(body: MemoryFile) -> CutBody:
    """Takes the base64 of files out of a JSON text, which is sealed then. For a worker thread."""
    pieces: list[bytes] = []
    texts: dict[str, EncodedText] = {}
    copied = 0
    for begin, end in long_texts(body):
        mark = secrets.token_hex(16)
        texts[mark] = EncodedText(body, begin, end)
        pieces += [body.read(copied, begin), mark.encode()]
        copied = end
    rest = body.read(copied, body.num_bytes)
    if not texts:
        return uncut(rest)
    body.seal()
    return CutBody(b"".join([*pieces, rest]), texts, body)


def long_texts(body: MemoryFile) -> list[tuple[int, int]]:
    """Where base64 of at least MIN_BYTES begins and ends that is all of a JSON string, or all of it behind
    the head of a data: URL.

    Between quotes without a comma or a colon there is a string: between two strings stands one of these. A
    backslash before the first quote makes it a part of one, where the mark is not understood.
    """
    found: list[tuple[int, int]] = []
    step = MIN_BYTES // 2  # any such text has a whole stretch without a quote, from one multiple to the next
    at = step
    while at + step <= body.num_bytes:
        if _find_quote(body, at, at + step) is None:
            first, end = _find_last_quote(body, at), _find_quote(body, at + step, body.num_bytes)
            if first is None or end is None:
                break
            begin = _behind_head(body, first + 1)
            if end - begin >= MIN_BYTES and _is_base64(body, begin, end):
                found.append((begin, end))
            at = end + -end % step
        else:
            at += step
    return found


def _find_quote(body: MemoryFile, begin: int, end: int) -> int | None:
    """Where the first quote between these places is."""
    for at, block in _blocks(body, begin, end):
        if (index := block.find(b'"')) >= 0:
            return at + index
    return None


def _find_last_quote(body: MemoryFile, end: int) -> int | None:
    """Where the last quote before this place is."""
    for stop in range(end, 0, -BLOCK_BYTES):
        begin = max(stop - BLOCK_BYTES, 0)
        if (index := body.read(begin, stop).rfind(b'"')) >= 0:
            return begin + index
        give_way()
    return None


def _behind_head(body: MemoryFile, begin: int) -> int:
    """Where the base64 of a string begins, which may be a data: URL."""
    head = body.read(begin, begin + MAX_HEAD_BYTES)
    return begin + head.find(b",") + 1 if head[: len(_HEAD)].lower() == _HEAD else begin


def _is_base64(body: MemoryFile, begin: int, end: int) -> bool:
    """Whether a text may be base64, and is a string in JSON: other characters that stand for nothing in
    JSON are left to the decoder of the file, which refuses them."""
    for _, block in _blocks(body, begin, end):
        characters = np.frombuffer(block, np.uint8)
        if characters.min() < _LOWEST or characters.max() > _HIGHEST or any(one in block for one in _OF_JSON):
            return False
    return True


def _blocks(body: MemoryFile, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """What stands between two places, in blocks with a pause behind each, and where they begin."""
    for at in range(begin, end, BLOCK_BYTES):
        yield at, body.read(at, min(at + BLOCK_BYTES, end))
        give_way()


def put_back(
    requests: Sequence[GenerateRequest], texts: Mapping[str, EncodedText]
) -> list[GenerateRequest] | None:
    """The requests with the files that marks stand for; None: some marks are not files of theirs."""
    files = put_back_files([file for one in requests for file in one.media], texts)
    if files is None:
        return None
    rest = iter(files)
    return [structs.replace(one, media=tuple([next(rest) for _ in one.media])) for one in requests]


def put_back_files(
    sources: Sequence[MediaSource], texts: Mapping[str, EncodedText]
) -> list[MediaSource] | None:
    """The files that marks stand for, among others; None: some marks are none of these."""
    used: set[str] = set()

    def source(one: MediaSource) -> MediaSource:
        head, comma, mark = one.url.partition(",")
        mark = mark if comma else one.base64
        if mark not in texts:
            return one
        used.add(mark)
        return structs.replace(one, url=head + comma, base64="", encoded=texts[mark])

    found = [source(one) for one in sources]
    return found if len(used) == len(texts) else None


def with_texts(data: bytes, texts: Mapping[str, EncodedText]) -> bytes:
    """JSON with the texts in place of their marks."""
    pieces: list[bytes] = []
    for mark, text in sorted(texts.items(), key=lambda one: data.find(one[0].encode())):
        before, _, data = data.partition(mark.encode())
        pieces += [before, text.read()]
    return b"".join([*pieces, data]) if pieces else data


def attempt(body: CutBody, take: Callable[[bytes], T], keep: Callable[[T], bool]) -> T:
    """What `take` makes of a body, first without the files in it, if `keep` can bring these back. What is
    refused is taken again as it came, so no error shows a mark. Raises what `take` raises."""
    if body.texts:
        try:
            taken = take(body.content)
        except RequestError:
            pass
        else:
            if keep(taken):
                return taken
    return take(body.whole)


async def attempt_later(body: CutBody, take: Callable[[bytes], Awaitable[T]], keep: Callable[[T], bool]) -> T:
    """See `attempt`, for a `take` that waits."""
    if body.texts:
        try:
            taken = await take(body.content)
        except RequestError:
            pass
        else:
            if keep(taken):
                return taken
    return await take(body.whole)
