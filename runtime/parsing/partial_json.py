"""JSON that arrives in deltas: where a value ends is known from its brackets and quotes alone.

`emit` may discard what has been read; `captured` and `string` remember positions, and emit into a list.
"""

import re
from collections.abc import Callable

import msgspec

from runtime.json_value import JsonValue
from runtime.parsing.reader import SPACE, Malformed, Read, Reader

_POINTS = re.compile(r'["{}\[\]]').search
_QUOTES = re.compile(r'["\\\x00-\x1f]').search
_OPEN = {"{": "}", "[": "]"}
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

Emit = Callable[[str], None]


def value(reader: Reader, emit: Emit) -> Read[None]:
    """Reads an object or a list and emits its text as it comes. Raises Malformed where brackets do not match,
    after the valid text was emitted.

    Control characters inside strings, which JSON forbids and models write, are escaped.
    """
    stack: list[str] = []
    while True:
        match = _POINTS(reader.text, reader.at)
        if match is None:
            yield from _rest(reader, emit)
            continue
        char = match[0]
        if char in "]}" and (not stack or stack[-1] != char):
            _leave(reader, emit, match.start())
            raise Malformed
        text = reader.text[reader.at : match.end()]
        reader.at = match.end()
        emit(text)
        if char == '"':
            yield from _string(reader, emit)
        elif char in _OPEN:
            stack.append(_OPEN[char])
        else:
            stack.pop()
            if not stack:
                return


def _string(reader: Reader, emit: Emit) -> Read[None]:
    """Reads the rest of a string whose opening quote has been read."""
    while True:
        match = _QUOTES(reader.text, reader.at)
        if match is None:
            yield from _rest(reader, emit)
            continue
        char, end = match[0], match.end()
        if char == "\\":
            if end == len(reader.text):
                _leave(reader, emit, match.start())
                if reader.is_final:
                    raise Malformed
                yield
                continue
            end += 1
        text = reader.text[reader.at : end]
        if char < " ":
            text = text[:-1] + (_CONTROL.get(char) or f"\\u{ord(char):04x}")
        reader.at = end
        emit(text)
        if char == '"':
            return


def _leave(reader: Reader, emit: Emit, end: int) -> None:
    """Emits the text up to `end`, wherever the deltas were cut."""
    if text := reader.text[reader.at : end]:
        reader.at = end
        emit(text)


def _rest(reader: Reader, emit: Emit) -> Read[None]:
    _leave(reader, emit, len(reader.text))
    if reader.is_final:
        raise Malformed
    yield


def string(reader: Reader, most: int) -> Read[str]:
    """Reads a string of at most `most` characters. -> its decoded text. Raises Malformed."""
    kept: list[str] = []
    begin = reader.at
    yield from reader.expect('"')
    yield from _within(reader, _string(reader, kept.append), begin, most)
    text = decode('"' + "".join(kept))
    assert isinstance(text, str)
    return text


def captured(reader: Reader, most: int) -> Read[str]:
    """Reads a value of at most `most` characters. -> its text. Raises Malformed."""
    kept: list[str] = []
    begin = reader.at
    char = yield from reader.peek()
    if char in _OPEN:
        yield from _within(reader, value(reader, kept.append), begin, most)
        return "".join(kept)
    if char == '"':
        return msgspec.json.encode((yield from string(reader, most))).decode()
    while (char := (yield from reader.peek())) and char not in ",}]" and char not in SPACE:
        reader.at += 1
    return reader.text[begin : reader.at]


def _within(reader: Reader, reading: Read[None], begin: int, most: int) -> Read[None]:
    """Reads no more than `most` characters from `begin` on. Raises Malformed where there are more."""
    for _ in reading:
        if reader.at - begin > most:
            break
        yield
    if reader.at - begin > most:
        reader.at = begin + most  # wherever the text was cut
        raise Malformed


def decode(text: str) -> JsonValue:
    """The value of a JSON text. Raises Malformed."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise Malformed from None
