"""Grammars of texts as grammars of the same texts within JSON strings: the terminals of a Lark grammar with
quotes, backslashes and control characters escaped, as JSON writers write them."""

import json
import re
from collections.abc import Iterable

from runtime.grammar.quoted_regex import quoted_regex

# terminals of Lark's library, which a grammar may import
COMMON = {
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "NUMBER": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+",
    "SIGNED_NUMBER": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+)",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[a-zA-Z]",
    "WORD": r"[a-zA-Z]+",
    "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
}

_STRING = r'"(?:\\.|[^"\\\n])*"'
_PARTS = re.compile(
    rf"(?P<comment>//[^\n]*|#[^\n]*)|(?P<low>{_STRING})\s*\.\.\s*(?P<high>{_STRING})"
    rf"|(?P<string>{_STRING})(?P<any_case>i?)"
    r"|/(?P<pattern>(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+)/(?P<flags>[imslux]*)"
    r"|%import\s+common\.(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?"
    r"|%import\s+common\s*\((?P<several>[^)]*)\)"
    r"|(?P<name>\b_?[A-Z][A-Z_0-9]*\b)(?:\.-?\d+)?"
    r"|(?P<other>%(?:import|ignore|json|regex|lark|override|extend|declare)\b[^\n]*|<\[?[\w|-]+\]?>)"
)


def quoted_lark(grammar: str) -> str:
    """The Lark grammar of JSON strings, without their quotes, of texts that `grammar` describes. Raises
    ValueError for what cannot be rewritten."""
    return _PARTS.sub(_quote, grammar)


def _quote(part: re.Match[str]) -> str:
    if part["comment"] is not None:
        return ""
    if part["other"] is not None:
        raise ValueError(f"{part['other'][:60]} is not possible here")
    if part["name"] is not None:
        return _rule(part["name"])
    if part["low"] is not None:
        low, high = _text(part["low"]), _text(part["high"])
        if len(low) != 1 or len(high) != 1:
            raise ValueError(f"{part[0][:60]} is no range of characters")
        return quoted_regex(f"[{re.escape(low)}-{re.escape(high)}]")
    if part["string"] is not None:
        text = _text(part["string"])
        if part["any_case"]:
            return quoted_regex(re.escape(text), "i")
        return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)
    if part["pattern"] is not None:
        return quoted_regex(part["pattern"].replace("\\/", "/"), part["flags"])
    if part["common"] is not None:
        return "\n".join(_imports([(part["common"], part["alias"] or part["common"])]))
    names = [name.strip() for name in part["several"].split(",")]
    return "\n".join(_imports([(name, name) for name in names]))


def _imports(names: Iterable[tuple[str, str]]) -> Iterable[str]:
    for name, alias in names:
        if name not in COMMON:
            raise ValueError(f"common.{name} is not known here; there are {', '.join(COMMON)}")
        yield f"{_rule(alias)}: {quoted_regex(COMMON[name])}"


def _rule(terminal: str) -> str:
    """The name of a rule in place of a terminal: escapes are symbols of their own."""
    return f"t_{terminal.lower()}"


def _text(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        raise ValueError(f"the string {literal[:60]} cannot be read") from None
