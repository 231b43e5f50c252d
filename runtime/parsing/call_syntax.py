"""How calls are written: as JSON, or a name before JSON. Each syntax is a declaration, whose `read` is the
generator that reads one call, or one list of calls.

`read` begins where the call begins. It raises Malformed when the text is no such call: before
`CallSink.begin` all of its text becomes content again, after that the rest of it.
"""

import re
from typing import Protocol

from msgspec import Struct

from runtime.parsing import partial_json
from runtime.parsing.reader import MAX_NAME, Malformed, Read, Reader, markers
from runtime.parsing.schema_types import Tools

MAX_HELD = 2**18  # characters of a call that are held back before its name is known

_NAME = re.compile(r"[\w.\-:/$]+")
_CALL_ID = re.compile(r"(?:functions\.)?([\w.\-/$]+):\d+")


class CallSink(Protocol):
    """Receives the calls that are read."""

    tools: Tools

    def begin(self, name: str, id: str | None = None) -> None:
        """A call of this function begins. Raises Malformed where it cannot be one."""
        ...

    def arguments(self, text: str) -> None:
        """The next delta of the call's arguments, as JSON text."""
        ...

    def end(self) -> None:
        """The call is complete."""
        ...


class CallSyntax(Protocol):
    """A way to write calls."""

    @property
    def begins(self) -> tuple[str, ...]:
        """What a call begins with; "": the first letter of a name."""
        ...

    def read(self, reader: Reader, sink: CallSink) -> Read[None]:
        """Reads one call, or one list of calls. Raises Malformed."""
        ...


class JsonCalls(Struct, frozen=True):
    """{"name": ..., "arguments": {...}}, or a list of them. Other keys are allowed and ignored."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    begins: tuple[str, ...] = ("{", "[")
    # stands before it, behind some words of which nothing is kept; then `begins` are those of the words, and
    # it
    lead: str = ""

    def read(self, reader: Reader, sink: CallSink) -> Read[None]:
        """See CallSyntax.read."""
        if self.lead:
            _, marker = yield from reader.until(markers(self.lead, "<"), MAX_NAME)
            if marker != self.lead:
                raise Malformed
            yield from reader.space()
        if not (yield from reader.sees("[")):
            yield from self._object(reader, sink)
            return
        while True:
            yield from reader.space(",")
            if (yield from reader.sees("]")):
                return
            yield from self._object(reader, sink)

    def _object(self, reader: Reader, sink: CallSink) -> Read[None]:
        yield from reader.expect("{")
        name: str | None = None
        early: str | None = None  # arguments that stand before the name
        done = False
        yield from reader.space()
        if not (yield from reader.sees("}")):
            while True:
                yield from reader.space()
                key = yield from partial_json.string(reader, MAX_NAME)
                yield from reader.space()
                yield from reader.expect(":")
                yield from reader.space()
                if key in self.names and name is None:
                    name = checked_name((yield from partial_json.string(reader, MAX_NAME)))
                elif key in self.arguments and not done and early is None:
                    if name is None:
                        early = yield from partial_json.captured(reader, MAX_HELD)
                    else:
                        yield from stream(reader, sink, name)
                        done = True
                else:
                    yield from partial_json.captured(reader, MAX_HELD)
                yield from reader.space()
                if (yield from reader.sees("}")):
                    break
                yield from reader.expect(",")
        if name is None:
            raise Malformed
        if not done:
            text = "{}" if early is None else as_object_text(early)
            sink.begin(name)
            sink.arguments(text)
        sink.end()


class KeyedJsonCalls(Struct, frozen=True):
    """[{NAME: {...}}, ...]: names are keys, of one object for each call or of one for several."""

    begins: tuple[str, ...] = ("[",)

    def read(self, reader: Reader, sink: CallSink) -> Read[None]:
        """See CallSyntax.read."""
        yield from reader.expect("[")
        while True:
            yield from reader.space(",")
            if (yield from reader.sees("]")):
                return
            yield from reader.expect("{")
            yield from reader.space()
            while not (yield from reader.sees("}")):
                name = checked_name((yield from partial_json.string(reader, MAX_NAME)))
                yield from reader.space()
                yield from reader.expect(":")
                yield from reader.space()
                yield from stream(reader, sink, name)
                sink.end()
                yield from reader.space(",")


def checked_name(name: str) -> str:
    """The name of a function. Raises Malformed for text that cannot be one."""
    if not _NAME.fullmatch(name):
        raise Malformed
    return name


def as_object_text(text: str) -> str:
    """Captured arguments as the text of an object: some models write the object into a string, or null.
    Raises Malformed for other values."""
    value = partial_json.decode(text)
    if isinstance(value, str):
        text = value
        value = partial_json.decode(value) if value.strip() else None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    return text


def stream(reader: Reader, sink: CallSink, name: str, id: str | None = None) -> Read[None]:
    """Reads the arguments of a call whose function is known; an object is passed on as it comes."""
    if (yield from reader.peek()) != "{":
        text = as_object_text((yield from partial_json.captured(reader, MAX_HELD)))
        sink.begin(name, id)
        sink.arguments(text)
        return
    sink.begin(name, id)
    yield from partial_json.value(reader, sink.arguments)


class NamedJsonCalls(Struct, frozen=True):
    """A name, something between, and the arguments as a JSON object: `begin` name `then` {...} `ends`."""

    begin: str
    then: tuple[str, ...]  # any of them; "{" belongs to the arguments
    ends: tuple[str, ...] = ()  # one after the other, with white space between; each may be missing
    id_then: str = ""  # name `id_then` id `then`, where the format has ids
    has_call_ids: bool = False  # the name is written in an id, functions.NAME:0

    @property
    def begins(self) -> tuple[str, ...]:
        """See CallSyntax."""
        return (self.begin,)

    def read(self, reader: Reader, sink: CallSink) -> Read[None]:
        """See CallSyntax.read."""
        yield from reader.expect(self.begin)
        stops = (*self.then, self.id_then) if self.id_then else self.then
        text, marker = yield from reader.until(markers(*stops), MAX_NAME)
        name, id = text.strip(), None
        if marker == self.id_then and marker:
            text, marker = yield from reader.until(markers(*self.then), MAX_NAME)
            id = text.strip() or None
        if self.has_call_ids and (match := _CALL_ID.fullmatch(name)):
            name, id = match[1], name
        checked_name(name)
        if marker == "{":
            reader.at -= 1
        yield from reader.space()
        if self.ends and (yield from reader.sees(self.ends[0])):  # no arguments
            sink.begin(name, id)
            sink.arguments("{}")
            sink.end()
            yield from skip_optional(reader, self.ends[1:])
            return
        yield from stream(reader, sink, name, id)
        sink.end()
        yield from skip_optional(reader, self.ends)


def skip_optional(reader: Reader, literals: tuple[str, ...]) -> Read[None]:
    """Reads literals that may be there, and the white space before them."""
    for literal in literals:
        at = reader.at
        yield from reader.space()
        if not (yield from reader.sees(literal)):
            reader.at = at


def is_name_start(char: str) -> bool:
    """Whether a function's name may begin with this character."""
    return char.isalnum() or char in "_$"


def may_begin_call(item: CallSyntax, text: str) -> bool:
    """Whether `text`, at least one character, may be the beginning of a call in this syntax."""
    return any(
        text.startswith(begin) or begin.startswith(text) if begin else is_name_start(text[0])
        for begin in item.begins
    )
