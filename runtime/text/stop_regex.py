"""Stop regular expressions (stop_regex) in a text that arrives in deltas.

A text ends with the first character that completes a match, as if the text ended there; of the matches that
end there, the one that begins first counts. So the result does not depend on how the text was cut. A match
has at most WINDOW characters: longer ones are not found. As much text is held back as a match may have, which
for many expressions is little (regex_width.py).

RE2's time is proportional to text and expression; both are bounded here, so no expression can block the event
loop.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from runtime.errors import InvalidRequest, install_line
from runtime.text.regex_width import longest_match

WINDOW = 4096
MAX_PROGRAM = 1024  # instructions of all of a request's expressions together
# their instructions times the characters of their longest matches: milliseconds for a token, at the very
# worst
MAX_WORK = 1 << 18
MAX_MEMORY = 1 << 20  # bytes that RE2 may take for one
ASSERTIONS = ("$", "\\b", "\\B", "\\z")  # may hold at the end of a text, and not when more text follows
FIELD = "stop_regex"
Compiled = Any  # an expression of google-re2, which has no types


class Expression:
    """A compiled expression. `name`: how the answer reports it."""

    __slots__ = ("name", "compiled", "width", "sees_end")

    def __init__(self, name: str, regex: str, compiled: Compiled) -> None:
        self.name = name
        self.compiled = compiled
        self.sees_end = any(assertion in regex for assertion in ASSERTIONS)
        # an assertion may look at one character more
        self.width = int(min(longest_match(regex) + self.sees_end, WINDOW))

    def find(self, text: str, begin: int, end: int) -> tuple[int, int, int] | None:
        """The first index behind `begin`, up to `end`, where a match is complete. -> that index, and where
        the match begins and ends"""
        if not self.sees_end and self.compiled.search(text, max(0, begin + 1 - self.width)) is None:
            return None
        for place in range(begin + 1, end + 1):
            if (match := self.compiled.search(text[:place], max(0, place - self.width))) is not None:
                return place, match.start(), match.end()
        return None


class StopRegexes:
    """The expressions of a request, and its stop strings; all its sequences share them."""

    __slots__ = ("expressions", "width")

    def __init__(self, regexes: Sequence[str], stops: Sequence[str] = ()) -> None:
        """Raises InvalidRequest for expressions that are invalid, too large or not supported."""
        re2 = _engine()
        self.expressions = [
            Expression(regex, regex, _compile(re2, i, regex)) for i, regex in enumerate(regexes)
        ]
        if sum(one.compiled.programsize * one.width for one in self.expressions) > MAX_WORK:
            raise InvalidRequest(
                f"{FIELD} is too large for what it may match; bound its repetitions, or shorten it",
                param=FIELD,
            )
        self.expressions += [
            Expression(stop, quoted := re2.escape(stop), re2.compile(quoted)) for stop in stops
        ]
        self.width = max(one.width for one in self.expressions)
        if (size := sum(one.compiled.programsize for one in self.expressions)) > MAX_PROGRAM:
            raise InvalidRequest(
                f"{FIELD} and stop are too large together ({size} instructions, the most is {MAX_PROGRAM})",
                param=FIELD,
            )


def _engine() -> ModuleType:
    """The re2 module, imported when it is first needed. Raises InvalidRequest where it is not installed."""
    try:
        import re2
    except ImportError:
        raise InvalidRequest(
            f"stop_regex needs the package google-re2 on the server: {install_line('regex')}", param=FIELD
        ) from None
    return re2


def _compile(re2: ModuleType, index: int, regex: str) -> Compiled:
    """Raises InvalidRequest, with the index of the expression."""
    options = re2.Options()
    options.log_errors, options.max_mem = False, MAX_MEMORY
    try:
        compiled = re2.compile(regex, options)
    except re2.error as error:
        words = (
            error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error.args[0])
        )
        raise InvalidRequest(f"{FIELD}[{index}] is not an expression of RE2: {words}", param=FIELD) from None
    except UnicodeEncodeError:
        raise InvalidRequest(f"{FIELD}[{index}] is not text", param=FIELD) from None
    if compiled.search("") is not None:
        raise InvalidRequest(
            f"{FIELD}[{index}] matches the empty text: the answer would end before it begins", param=FIELD
        )
    return compiled


class RegexSearch:
    """Searches the text of one sequence. `matched`: the expression that ended it."""

    __slots__ = ("matched", "_stops", "_seen", "_held")

    def __init__(self, stops: StopRegexes) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._seen = ""  # where a match may have begun, and a character before it for those that look back
        self._held = 0  # of its last characters, those that have not left

    def feed(self, delta: str, keep_match: bool = False) -> str:
        """The text that may be sent now. When this sets `matched`, it is the last text: up to the match, or
        with it if `keep_match`."""
        if not delta:
            return ""
        text = self._seen + delta
        begin, unsent = len(self._seen), len(self._seen) - self._held
        found: tuple[int, int, int] | None = None
        for expression in self._stops.expressions:
            one = expression.find(text, begin, len(text) if found is None else found[0])
            if one is not None and (found is None or one < found):
                found, self.matched = one, expression.name
        if found is not None:
            self._seen, self._held = "", 0
            return text[unsent : max(unsent, found[2] if keep_match else found[1])]
        self._held = 0 if keep_match else min(self._stops.width - 1, len(text) - unsent)
        self._seen = text[-self._stops.width :]
        return text[unsent : len(text) - self._held]

    def flush(self) -> str:
        """The text that was held back: at the end of the sequence no match can be completed any more."""
        held, self._held = self._seen[len(self._seen) - self._held :], 0
        return held
