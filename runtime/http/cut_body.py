"""Bodies with files in them: the base64 is taken out before the JSON is decoded.

A picture of 3840 x 2160 is some three megabytes of base64. The decoder would look at each character of it and
copy it, and the event loop would wait for that. So a worker thread finds such texts in the body and leaves a
mark in place of each that clients cannot guess. What is decoded is small, and the files stay where they came.

A mark that turns up anywhere but as a file of the request was a text of another kind; then the body is
decoded as it came.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from msgspec import Struct, structs

from runtime.errors import RequestError
from runtime.messages.media import MediaSource
from runtime.messages.requests import GenerateRequest

T = TypeVar("T")

MIN_BYTES = 1 << 18  # of a text that is taken out
BLOCK_BYTES = 1 << 16  # looked at by one call of numpy, some of which hold the interpreter
MAX_HEAD_BYTES = 256  # of a data: URL before its base64
_HEAD = b"data:"
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_="
_IS_OTHER = np.ones(256, np.bool_)
_IS_OTHER[np.frombuffer(_ALPHABET, np.uint8)] = False


class CutBody(Struct, frozen=True):
    """A body, and the same with marks in place of the base64 in it."""

    whole: bytes
    content: bytes  # `whole` itself, where nothing was taken out
    texts: Mapping[str, memoryview]  # of each mark, the part of `whole` that it stands for


def uncut(body: bytes) -> CutBody:
    """A body that is decoded as it came."""
    return CutBody(body, body, {})


def cut(body: bytes) -> CutBody:
    """Takes the base64 of files out of a JSON text. For a worker thread."""
    pieces: list[bytes | memoryview] = []
    texts: dict[str, memoryview] = {}
    view, copied = memoryview(body), 0
    for begin, end in long_texts(body):
        mark = secrets.token_hex(16)
        texts[mark] = view[begin:end]
        pieces += [view[copied:begin], mark.encode()]
        copied = end
    if not texts:
        return uncut(body)
    return CutBody(body, b"".join([*pieces, view[copied:]]), texts)


def long_texts(body: bytes) -> list[tuple[int, int]]:
    """Where base64 of at least MIN_BYTES begins and ends that is all of a JSON string, or all of it behind
    the head of a data: URL.

    Between quotes with nothing else than base64 there is a string: between two strings stands a comma or a
    colon. A backslash before the first quote makes it a part of one, where the mark is not understood.
    """
    found: list[tuple[int, int]] = []
    step = MIN_BYTES // 2  # any such text has a whole stretch without a quote, from one multiple to the next
    at = step
    while at + step <= len(body):
        if body.find(b'"', at, at + step) < 0:
            begin, end = body.rfind(b'"', 0, at) + 1, body.find(b'"', at + step)
            if begin == 0 or end < 0:
                break
            begin = _behind_head(body, begin)
            if end - begin >= MIN_BYTES and _is_base64(body, begin, end):
                found.append((begin, end))
            at = end + -end % step
        else:
            at += step
    return found


def _behind_head(body: bytes, begin: int) -> int:
    """Where the base64 of a string begins, which may be a data: URL."""
    if body[begin : begin + len(_HEAD)].lower() != _HEAD:
        return begin
    return body.find(b",", begin, begin + MAX_HEAD_BYTES) + 1 or begin


def _is_base64(body: bytes, begin: int, end: int) -> bool:
    for at in range(begin, end, BLOCK_BYTES):
        block = np.frombuffer(body, np.uint8, min(BLOCK_BYTES, end - at), at)
        if _IS_OTHER.take(block).any():
            return False
    return True


def put_back(
    requests: Sequence[GenerateRequest], texts: Mapping[str, memoryview]
) -> list[GenerateRequest] | None:
    """The requests with the files that marks stand for; None: some marks are not files of theirs."""
    files = put_back_files([file for one in requests for file in one.media], texts)
    if files is None:
        return None
    rest = iter(files)
    return [structs.replace(one, media=tuple([next(rest) for _ in one.media])) for one in requests]


def put_back_files(
    sources: Sequence[MediaSource], texts: Mapping[str, memoryview]
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


def with_texts(data: bytes, texts: Mapping[str, memoryview]) -> bytes:
    """JSON with the texts in place of their marks."""
    pieces: list[bytes | memoryview] = []
    for mark, text in sorted(texts.items(), key=lambda one: data.find(one[0].encode())):
        before, _, data = data.partition(mark.encode())
        pieces += [before, text]
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
