"""Calls in other notations than JSON: Python's, and Gemma's. One call is read in full, then converted."""

import ast
import re
import warnings
from keyword import kwlist

from msgspec import Struct

from runtime.json_value import JsonValue
from runtime.parsing.call_syntax import MAX_HELD, CallSink, checked_name
from runtime.parsing.reader import MAX_NAME, SPACE, Malformed, Read, Reader, markers
from runtime.parsing.schema_types import as_json

_POINTS = re.compile(r"""["'()\[\]{}]""").search
_QUOTES = {quote: re.compile(rf"[\\{quote}]").search for quote in "'\""}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
# taken away again wherever it stands: what looks like a parameter may be within a string
_MARK = "_0reserved0_"
_RESERVED = re.compile(r"((?:^|,)\s*(?:" + "|".join(kwlist) + r"))(\s*=)")
MAX_DEPTH = 64  # of values in values
_WORDS = {"true": True, "false": False, "null": None}


class PythonicCalls(Struct, frozen=True):
    """[f(a=1, b="x"), g()], or the same without brackets, a call a line."""

    begins: tuple[str, ...] = ("[",)

    def read(self, reader: Reader, sink: CallSink) -> Read[None]:
        """See CallSyntax.read."""
        in_list = yield from reader.sees("[")
        while True:
            yield from reader.space(",")
            if in_list and (yield from reader.sees("]")):
                return
            name, _ = yield from reader.until(markers("("), MAX_NAME)
            name = checked_name(name.strip())
            body = yield from balanced(reader)
            arguments = as_json(keywords(body))
            sink.begin(name)
            sink.arguments(arguments)
            sink.end()
            if not in_list:
                return


def balanced(reader: Reader) -> Read[str]:
    """The text between a parenthesis that has been read and its partner, which is read as well. Raises
    Malformed."""
    begin = at = reader.at
    stack = [")"]
    quote = ""
    while stack:
        match = (_QUOTES[quote] if quote else _POINTS)(reader.text, at)
        if match is None or (quote and match[0] == "\\" and match.end() == len(reader.text)):
            at = len(reader.text) if match is None else match.start()
            if reader.is_final or at - begin > MAX_HELD:
                reader.at = min(at, begin + MAX_HELD)
                raise Malformed
            yield
            continue
        char, at = match[0], match.end()
        if quote:
            if char == "\\":
                at += 1
            else:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in _PAIRS:
            stack.append(_PAIRS[char])
        elif stack.pop() != char:
            raise Malformed
    reader.at = min(at, begin + MAX_HELD)
    if reader.at < at:
        raise Malformed
    return reader.text[begin : at - 1]


def keywords(text: str) -> dict[str, object]:
    """The keyword arguments of a call, which must be literals. Raises Malformed."""
    if not _parses(text):  # strings on several lines, or parameters whose names are words of Python
        text = _RESERVED.sub(rf"\1{_MARK}\2", text.replace("\r", "\\r").replace("\n", "\\n"))
    call = _parsed(text)
    if call.args:
        raise Malformed
    return {_key(keyword): _literal(keyword.value) for keyword in call.keywords}


def _parses(text: str) -> bool:
    try:
        _parsed(text)
    except Malformed:
        return False
    return True


def _parsed(text: str) -> ast.Call:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in a model's strings
            tree = ast.parse(f"f({text})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise Malformed
    return tree


def _key(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise Malformed
    return keyword.arg.replace(_MARK, "")


def _literal(node: ast.expr) -> JsonValue:
    match node:
        case ast.Constant(value=str() as text):
            return text.replace(_MARK, "")
        case ast.Constant(value=int() | float() | None as value):
            return _finite(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return _finite(-number)
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {_text(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise Malformed


def _finite(value: float | None) -> float | None:
    if isinstance(value, float) and value - value != 0:
        raise Malformed  # JSON has no such number
    return value


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace(_MARK, "")
    raise Malformed


class BareCalls(Struct, frozen=True):
    """call:NAME{key:value,...}: keys are bare, strings stand between `quote`s, inside which nothing is
    escaped."""

    quote: str
    begin: str = "call:"

    @property
    def begins(self) -> tuple[str, ...]:
        """See CallSyntax."""
        return (self.begin,)

    def read(self, reader: Reader, sink: CallSink) -> Read[None]:
        """See CallSyntax.read."""
        yield from reader.expect(self.begin)
        name, _ = yield from reader.until(markers("{"), MAX_NAME)
        name = checked_name(name.strip())
        pairs = yield from self._pairs(reader, 0)
        arguments = as_json(pairs)
        sink.begin(name)
        sink.arguments(arguments)
        sink.end()

    def _pairs(self, reader: Reader, depth: int) -> Read[dict[str, JsonValue]]:
        """Keys and values up to the closing brace."""
        pairs: dict[str, JsonValue] = {}
        while True:
            yield from reader.space(",")
            if (yield from reader.sees("}")):
                return pairs
            key, _ = yield from reader.until(markers(":"), MAX_NAME)
            pairs[key.strip().removeprefix(self.quote).removesuffix(self.quote)] = yield from self._value(
                reader, depth + 1
            )

    def _value(self, reader: Reader, depth: int) -> Read[JsonValue]:
        if depth > MAX_DEPTH or reader.at > MAX_HELD:
            raise Malformed
        yield from reader.space()
        if (yield from reader.sees(self.quote)):
            text, _ = yield from reader.until(markers(self.quote), MAX_HELD)
            return text
        if (yield from reader.sees("{")):
            return (yield from self._pairs(reader, depth))
        if (yield from reader.sees("[")):
            values: list[JsonValue] = []
            while True:
                yield from reader.space(",")
                if (yield from reader.sees("]")):
                    return values
                values.append((yield from self._value(reader, depth + 1)))
        text, marker = yield from reader.until(markers(",", "}", "]", self.quote), MAX_NAME)
        if marker == self.quote:  # the first of the two quotes is missing
            return text.strip(SPACE)
        value = _bare(text.strip(SPACE))
        if isinstance(value, str) and marker == "," and (rest := (yield from self._rest(reader))):
            return value + marker + rest
        reader.at -= len(marker)
        return value

    def _rest(self, reader: Reader) -> Read[str]:
        """The continuation of a string without its first quote behind a comma; "" where another pair or value
        begins, and nothing is read."""
        begin = reader.at
        try:
            rest, marker = yield from reader.until(markers("}", "]", "{", "[", ":", self.quote), MAX_NAME)
        except Malformed:
            rest = marker = ""
        if marker == self.quote and rest.strip(SPACE):
            return rest
        reader.at = begin
        return ""


def _bare(text: str) -> JsonValue:
    if text in _WORDS:
        return _WORDS[text]
    if re.fullmatch(r"-?\d{1,300}", text):
        return int(text)
    if re.fullmatch(r"-?\d{1,300}\.\d{1,300}(?:[eE][+-]?\d{1,3})?|-?\d{1,300}[eE][+-]?\d{1,3}", text):
        number = float(text)
        return number if number - number == 0 else text
    return text
