"""Calls as markup: an element for each parameter, or nested elements. Types come from the tool's schema where
the markup does not declare them."""

from msgspec import Struct

from runtime.json_value import JsonValue
from runtime.parsing.call_syntax import MAX_HELD, CallSink, JsonCalls, checked_name, skip_optional, stream
from runtime.parsing.reader import MAX_NAME, Malformed, Read, Reader, markers
from runtime.parsing.schema_types import (
    Schema,
    as_json,
    child_of,
    items_of,
    kinds_of,
    parameters_of,
    value_of,
)

MAX_DEPTH = 32  # of elements in elements
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_UNTYPED = {"true": True, "false": False, "null": None}


class XmlCalls(Struct, frozen=True, kw_only=True):
    """Markup: `begin` NAME `name_end`, for each parameter `key` KEY `key_end` VALUE `value_end`, then
    `ends`."""

    begin: str
    name_end: str  # the name ends there, or where a parameter or the call's end begins
    key: str
    key_end: str
    value_end: str
    ends: tuple[str, ...]  # one after the other, with white space between; all but the first may be missing
    before_value: str = ""  # after key_end and white space
    # around the value's type, between key_end and before_value, where the markup declares it
    type_tags: tuple[str, str] | None = None
    # or KEY `type_mark` TYPE: a type of JSON Schema, or true or false for a string or none
    type_mark: str = ""
    is_trimmed: bool = False  # values stand on lines of their own
    is_escaped: bool = False  # &quot; and &amp; in keys
    takes_json: bool = False  # behind the name, the arguments may also be one JSON object
    takes_cdata: bool = False  # a value may stand in a CDATA section
    # ends of calls that also end a value; then so does the next parameter that the tool has, on a new line
    unclosed: tuple[str, ...] = ()
    whole: JsonCalls | None = None  # a call that may stand in place of name and parameters

    @property
    def begins(self) -> tuple[str, ...]:
        """See CallSyntax."""
        return (self.begin,)

    def read(self, reader: Reader, sink: CallSink) -> Read[None]:
        """See CallSyntax.read."""
        yield from reader.expect(self.begin)
        if self.whole is not None:
            yield from reader.space()
            if (yield from reader.peek()) in self.whole.begins:
                yield from self.whole.read(reader, sink)
                yield from skip_optional(reader, self.ends)
                return
        stops = (self.name_end, self.key, *self.ends) if self.name_end else (self.key, *self.ends)
        name, marker = yield from reader.until(markers(*stops), MAX_NAME)
        if marker != self.name_end:
            reader.at -= len(marker)
        name = checked_name(name.strip().partition('"')[0].removesuffix("\\n").strip())
        yield from reader.space()
        if self.takes_json and (yield from reader.peek()) == "{":
            yield from stream(reader, sink, name)
            yield from skip_optional(reader, self.ends[:1])
        else:
            yield from self._parameters(reader, sink, name)
        sink.end()
        yield from skip_optional(reader, self.ends[1:])

    def _parameters(self, reader: Reader, sink: CallSink, name: str) -> Read[None]:
        """Reads up to the first of `ends`. The call begins when its first parameter or its end is there."""
        has_begun = False
        while True:
            yield from reader.space()
            if (yield from reader.sees(self.ends[0])):
                if not has_begun:
                    sink.begin(name)
                    sink.arguments("{")
                sink.arguments("}")
                return
            yield from reader.expect(self.key)
            key, types = yield from self._key(reader, sink, name)
            if not has_begun:
                sink.begin(name)
            sink.arguments(("{" if not has_begun else ", ") + as_json(key) + ": ")
            has_begun = True
            others = self._others(sink, name)
            if types == {"string"}:
                yield from self._text(reader, sink, others)
            else:
                yield from self._value(reader, sink, types, others)

    def _key(self, reader: Reader, sink: CallSink, name: str) -> Read[tuple[str, frozenset[str]]]:
        """Reads up to where the value begins. -> the parameter and its types"""
        key, _ = yield from reader.until(markers(self.key_end), MAX_NAME)
        declared = ""
        if self.type_mark:
            key, _, declared = key.partition(self.type_mark)
        elif self.type_tags:
            yield from reader.space()
            if (yield from reader.sees(self.type_tags[0])):
                declared, _ = yield from reader.until(markers(self.type_tags[1]), MAX_NAME)
        if self.before_value:
            yield from reader.space()
            yield from reader.expect(self.before_value)
        key = key.strip()
        if self.is_escaped:
            key = key.replace("&quot;", '"').replace("&amp;", "&")
        root = sink.tools.get(name)
        return key, _types(kinds_of(child_of(root, key, root), root), declared.strip(' "'))

    def _others(self, sink: CallSink, name: str) -> tuple[str, ...]:
        """Texts that end a value that is not closed, and stay unread."""
        if not self.unclosed:
            return ()
        root = sink.tools.get(name)
        return (*self.unclosed, *[f"\n{self.key}{key}{self.key_end}" for key in parameters_of(root, root)])

    def _cdata(self, reader: Reader) -> Read[str]:
        """Text that stands between a value and its end, apart from white space."""
        if self.takes_cdata and (yield from reader.sees(_CDATA)):
            return _CDATA_END
        return ""

    def _text(self, reader: Reader, sink: CallSink, others: tuple[str, ...]) -> Read[None]:
        """Reads a string, which is passed on as it comes."""
        cdata = yield from self._cdata(reader)
        end = cdata + self.value_end
        if self.is_trimmed and not cdata:
            yield from reader.sees("\n")
        stops = markers("\n" + end, end, *others) if self.is_trimmed and not cdata else markers(end)
        sink.arguments('"')
        marker = ""
        while not marker:
            text, marker = yield from reader.piece(stops)
            if marker in others:
                reader.at -= len(marker)
            if text:
                sink.arguments(as_json(text)[1:-1])
        sink.arguments('"')

    def _value(
        self, reader: Reader, sink: CallSink, types: frozenset[str], others: tuple[str, ...]
    ) -> Read[None]:
        kept: list[str] = []
        stops = markers((yield from self._cdata(reader)) + self.value_end, *others)
        marker = ""
        while not marker:
            try:
                text, marker = yield from reader.piece(stops)
            except Malformed:  # cut off: what there is leaves as it stands
                sink.arguments("".join(kept))
                raise
            kept.append(text)
        if marker in others:
            reader.at -= len(marker)
        value = "".join(kept)
        if self.is_trimmed:
            value = value.removeprefix("\n").removesuffix("\n")
        sink.arguments(as_json(value_of(value, types)))


def _types(types: frozenset[str], declared: str) -> frozenset[str]:
    """The types of a value, where the schema allows `types` and the markup declares `declared`."""
    if declared in ("", "any"):
        return types
    if declared == "true":
        return frozenset({"string"})
    if declared == "false":
        return types - {"string"}
    return types if len(types - {"null"}) == 1 else frozenset({declared})


Element = tuple[str, list[tuple[str, "Element"]]]  # its text, and its children by tag


class NestedXmlCalls(Struct, frozen=True):
    """Nested elements: `<invoke name="NAME">`, then `<KEY>` VALUE `</KEY>`. An object's value is elements, a
    list's is elements named item. `mark` stands before every tag, so that values may hold markup of their
    own."""

    mark: str

    @property
    def begins(self) -> tuple[str, ...]:
        """See CallSyntax."""
        return (self.mark + "<invoke ", self.mark + " <invoke ", self.mark + "\n<invoke ")

    def read(self, reader: Reader, sink: CallSink) -> Read[None]:
        """See CallSyntax.read."""
        yield from reader.expect(self.mark)
        yield from reader.space()
        yield from reader.expect('<invoke name="')
        name = checked_name((yield from reader.until(markers('">'), MAX_NAME))[0])
        root = sink.tools.get(name)
        lead = "{"
        while (key := (yield from self._tag(reader))) != "/invoke":
            element = yield from self._element(reader, key, 1)
            if lead == "{":
                sink.begin(name)
            sink.arguments(
                lead + as_json(key) + ": " + as_json(_value_of(element, child_of(root, key, root), root))
            )
            lead = ", "
        if lead == "{":
            sink.begin(name)
            sink.arguments("{")
        sink.arguments("}")
        sink.end()

    def _tag(self, reader: Reader) -> Read[str]:
        yield from reader.space()
        yield from reader.expect(self.mark)
        return (yield from self._rest(reader))

    def _rest(self, reader: Reader) -> Read[str]:
        yield from reader.space()
        yield from reader.expect("<")
        return (yield from reader.until(markers(">"), MAX_NAME))[0].strip()

    def _element(self, reader: Reader, tag: str, depth: int) -> Read[Element]:
        """Reads an element up to its end tag."""
        if depth > MAX_DEPTH or tag.startswith("/"):
            raise Malformed
        children: list[tuple[str, Element]] = []
        texts: list[str] = []
        stops = markers(self.mark)
        while True:
            marker = ""
            while not marker:
                text, marker = yield from reader.piece(stops)
                texts.append(text)
                if reader.at > MAX_HELD:
                    reader.at = MAX_HELD  # wherever the text was cut
                    raise Malformed
            inner = yield from self._rest(reader)
            if inner == "/" + tag:
                return "".join(texts), children
            children.append((inner, (yield from self._element(reader, inner, depth + 1))))


def _value_of(element: Element, schema: JsonValue, root: Schema | None) -> JsonValue:
    text, children = element
    types = kinds_of(schema, root)
    if not children:
        if not text.strip() and types and types <= {"object", "array"}:
            return [] if types == {"array"} else {}
        if types:
            return value_of(text, types)
        return _UNTYPED.get(text.strip(), text)  # a number may be meant as a string
    if text.strip():
        raise Malformed
    if "array" in types or ("object" not in types and {tag for tag, _ in children} == {"item"}):
        return [_value_of(child, items_of(schema, at, root), root) for at, (_, child) in enumerate(children)]
    pairs: dict[str, JsonValue] = {}
    several: dict[str, list[JsonValue]] = {}
    for tag, child in children:
        value = _value_of(child, child_of(schema, tag, root), root)
        values = several.setdefault(tag, [])
        values.append(value)
        pairs[tag] = value if len(values) == 1 else values
    return pairs
