"""Regular expressions of texts as expressions of the same texts within JSON strings."""

import json
import re
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, TypeAlias

Part: TypeAlias = tuple[Any, Any]  # an operator of Python's parser, and what it is applied to
Ranges: TypeAlias = list[tuple[int, int]]  # characters from one to another

_LAST = 0x10FFFF
_CLASSES: dict[str, Ranges] = {
    "DIGIT": [(0x30, 0x39)],
    "SPACE": [(0x09, 0x0D), (0x20, 0x20)],
    "WORD": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
}
_ESCAPED = [*range(0x20), 0x22, 0x5C]  # characters that JSON escapes
_EDGES = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING, ops.AT_END, ops.AT_END_STRING)
_REPEATS = (ops.MAX_REPEAT, ops.MIN_REPEAT)
_CHARACTERS = (ops.ANY, ops.LITERAL, ops.NOT_LITERAL, ops.IN)
_UNREADABLE = "the regular expression can't be kept within JSON"


def quoted_regex(pattern: str, flags: str = "") -> str:
    """Lark symbols of JSON strings, without their quotes, of texts that `pattern` matches from their first
    character to their last. Raises ValueError for what cannot be rewritten.

    The lexer never goes back, so an escape is a symbol of its own: behind its backslash others may follow.
    """
    known = {"i": re.IGNORECASE, "s": re.DOTALL, "m": re.MULTILINE, "x": re.VERBOSE}
    number = 0
    for flag in flags:
        number |= known.get(flag, 0)
    try:
        tree = parser.parse(pattern, number)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the regular expression {pattern[:60]} can't be read: {error}") from None
    return _Writer(tree.state.flags).symbols(list(tree))


class _Writer:
    """Writes the parts of an expression, as Python's parser reports them."""

    def __init__(self, flags: int) -> None:
        self._flags = flags

    def symbols(self, parts: list[Part]) -> str:
        """Symbols of parts one after the other; neighbours without escapes are one expression."""
        found: list[str] = []
        plain = ""
        for at, (op, value) in enumerate(parts):
            if op is ops.AT and value in _EDGES:
                continue  # the whole text matches
            if not self._has_escapes(op, value):
                plain += self._plain(op, value)
                continue
            if plain:
                found.append(f"/{plain}/")
                plain = ""
            self._check_end(op, value, parts[at + 1 :])
            found.append(self._symbol(op, value))
        if plain:
            found.append(f"/{plain}/")
        return f"({' '.join(found)})"

    def _symbol(self, op: object, value: Any) -> str:
        """Symbols of a part with escapes."""
        if op is ops.BRANCH:
            return f"({' | '.join([self.symbols(list(one)) for one in value[1]])})"
        if op is ops.SUBPATTERN:
            return self.symbols(list(value[3]))
        if op in _REPEATS:
            low, high, body = value
            if len(body) == 1 and body[0][0] in _CHARACTERS:
                one = _class(self._characters(*body[0]), "+")
            else:
                one = self.symbols(list(body))
            bounds = {(0, 1): "?", (0, parser.MAXREPEAT): "*", (1, parser.MAXREPEAT): "+"}
            if (low, high) not in bounds and "+" in one:
                raise ValueError(f"{_UNREADABLE}: it counts characters that may be escaped")
            return f"({one}){bounds.get((low, high)) or _counts(low, high)}"
        return _class(self._characters(op, value), "")

    def _plain(self, op: object, value: Any) -> str:
        """The expression of a part without escapes."""
        if op is ops.AT and value in _EDGES:
            return ""
        if op is ops.BRANCH:
            branches = ["".join([self._plain(*part) for part in one]) for one in value[1]]
            return f"(?:{'|'.join(branches)})"
        if op is ops.SUBPATTERN:
            return f"(?:{''.join([self._plain(*part) for part in value[3]])})"
        if op in _REPEATS:
            low, high, body = value
            bound = "" if high is parser.MAXREPEAT else high
            return f"(?:{''.join([self._plain(*part) for part in body])}){{{low},{bound}}}"
        return _plain_class(self._characters(op, value))

    def _has_escapes(self, op: object, value: Any) -> bool:
        if op is ops.AT and value in _EDGES:
            return False
        if op is ops.BRANCH:
            return any([self._has_escapes(*part) for one in value[1] for part in one])
        if op is ops.SUBPATTERN or op in _REPEATS:
            return any([self._has_escapes(*part) for part in value[3 if op is ops.SUBPATTERN else 2]])
        return any([low <= code <= high for low, high in self._characters(op, value) for code in _ESCAPED])

    def _check_end(self, op: object, value: Any, after: list[Part]) -> None:
        """Raises ValueError where no escape ends a repetition: the lexer would never end it."""
        while op is ops.SUBPATTERN and value[3]:
            op, value = list(value[3])[-1]
        if op not in _REPEATS or not after or after[0][0] is ops.AT:
            return
        following, one = after[0]
        is_escape = following is ops.LITERAL and one in _ESCAPED
        if not is_escape:
            raise ValueError(f"{_UNREADABLE}: what ends a repetition must be a quote or a line break")

    def _characters(self, op: object, value: Any) -> Ranges:
        """The characters that one position may have."""
        if op is ops.ANY:
            return [(0, _LAST)] if self._flags & re.DOTALL else _without([(0, _LAST)], [(10, 10)])
        if op is ops.LITERAL:
            return self._cases([(value, value)])
        if op is ops.NOT_LITERAL:
            return _without([(0, _LAST)], self._cases([(value, value)]))
        if op is not ops.IN:
            raise ValueError(f"{_UNREADABLE}: it has {str(op).lower()}")
        found: Ranges = []
        is_negated = False
        for kind, one in value:
            if kind is ops.NEGATE:
                is_negated = True
            elif kind is ops.LITERAL:
                found += self._cases([(one, one)])
            elif kind is ops.RANGE:
                found += self._cases([one])
            elif kind is ops.CATEGORY:
                found += _category(str(one))
            else:
                raise ValueError(f"{_UNREADABLE}: it has {str(kind).lower()}")
        return _without([(0, _LAST)], found) if is_negated else found

    def _cases(self, ranges: Ranges) -> Ranges:
        """With the other case of letters, where case does not count."""
        if not self._flags & re.IGNORECASE:
            return ranges
        others = [
            (ord(other), ord(other))
            for low, high in ranges
            for code in range(low, min(high, 0x24F) + 1)
            for other in (chr(code).lower(), chr(code).upper())
            if len(other) == 1
        ]
        return ranges + others


def _category(name: str) -> Ranges:
    """Characters of \\d, \\s, \\w, among ASCII, and all others of \\D, \\S, \\W."""
    bare = name.removeprefix("CATEGORY_").removeprefix("UNI_")
    known = _CLASSES.get(bare.removeprefix("NOT_"))
    if known is None:
        raise ValueError(f"{_UNREADABLE}: it has {name.lower()}")
    return _without([(0, _LAST)], known) if bare.startswith("NOT_") else known


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    """`ranges` without the characters of `others`."""
    for low, high in others:
        ranges = [
            piece
            for first, last in ranges
            for piece in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if piece[0] <= piece[1]
        ]
    return ranges


def _class(ranges: Ranges, more: str) -> str:
    """Symbols of one character of these, as JSON writes it; of `more` "+", those without escapes together."""
    choices = []
    if _without(ranges, [(code, code) for code in _ESCAPED]):
        choices.append(f"/{_plain_class(ranges)}{more}/")
    for code in _ESCAPED:
        if any([low <= code <= high for low, high in ranges]):
            choices.append("/" + "".join([_code(ord(char)) for char in json.dumps(chr(code))[1:-1]]) + "/")
    if not choices:
        raise ValueError(f"{_UNREADABLE}: a part of it matches nothing")
    return f"({' | '.join(choices)})"


def _plain_class(ranges: Ranges) -> str:
    """An expression of those of these characters that JSON does not escape."""
    plain = _without(_without(ranges, [(code, code) for code in _ESCAPED]), [(0xD800, 0xDFFF)])
    if not plain:
        raise ValueError(f"{_UNREADABLE}: a part of it matches nothing")
    return f"[{''.join([f'{_code(low)}-{_code(high)}' for low, high in plain])}]"


def _counts(low: int, high: int) -> str:
    return f"~{low}..{high}" if high is not parser.MAXREPEAT else f"~{low}.."


def _code(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"
