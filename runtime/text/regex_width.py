"""The longest match of a regular expression, in characters: as much must be held back of a text that may end
at a match.

Reads the syntax of RE2. RE2 has compiled the expressions before, so syntax errors are not reported here.
Constructs that are not understood count as longer than they are, never as shorter.
"""

import math
import re

_ESCAPE = re.compile(
    r"\\(?:Q(?P<quoted>.*?)(?:\\E|$)|[pP](?:\{[^}]*\}|.)|x(?:\{[^}]*\}|..)"
    r"|0?[0-7]{1,3}|(?P<empty>[AbBzE])|.)",
    re.DOTALL,
)
_CLASS = re.compile(r"\[\^?\]?(?:\[:\^?\w+:\]|\\[pPx]\{[^}]*\}|\\.|[^\]\\])*\]", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[imsU-]*:))?")
_FLAGS = re.compile(r"\(\?[imsU-]+\)")
# RE2 takes as text what has leading zeros or from nine digits on
_REPEAT = re.compile(
    r"(?:(?P<sign>[*+?])|\{(?P<low>0|[1-9][0-9]{0,7})(?P<comma>,(?P<high>0|[1-9][0-9]{0,7}|))?\})\??"
)
MAX_NESTED = 100  # groups


def longest_match(regex: str) -> float:
    """Characters; infinite where there is no bound, and for more than MAX_NESTED groups in each other."""
    width, end = _either(regex, 0, MAX_NESTED)
    return width if end == len(regex) else math.inf


def _either(regex: str, at: int, room: int) -> tuple[float, int]:
    """Reads branches up to the end of a group or of the expression; `room`: groups that may still be opened.
    -> the longest match, and where the end is"""
    if not room:
        return math.inf, len(regex)
    longest = width = 0.0
    while at < len(regex) and regex[at] != ")":
        if regex[at] == "|":
            longest, width = max(longest, width), 0.0
            at += 1
            continue
        if flags := _FLAGS.match(regex, at):
            at = flags.end()
            continue
        one, at = _atom(regex, at, room)
        times, at = _times(regex, at)
        width += one * times if one else 0.0
    return max(longest, width), at


def _atom(regex: str, at: int, room: int) -> tuple[float, int]:
    match regex[at]:
        case "(":
            opening = _GROUP.match(regex, at)
            assert opening is not None
            width, end = _either(regex, opening.end(), room - 1)
            return width, end + 1
        case "[" if found := _CLASS.match(regex, at):
            return 1.0, found.end()
        case "\\" if found := _ESCAPE.match(regex, at):
            width = 0.0 if found["empty"] else 1.0 if found["quoted"] is None else float(len(found["quoted"]))
            return width, found.end()
        case "^" | "$":
            return 0.0, at + 1
    return 1.0, at + 1


def _times(regex: str, at: int) -> tuple[float, int]:
    """How often at most the atom before is repeated, and where the repetition ends."""
    times = 1.0
    while repeat := _REPEAT.match(regex, at):
        at = repeat.end()
        if repeat["sign"]:
            times = times if repeat["sign"] == "?" else math.inf
        elif repeat["comma"] is None:
            times *= int(repeat["low"])
        else:
            times = times * int(repeat["high"]) if repeat["high"] else math.inf
    return times, at
