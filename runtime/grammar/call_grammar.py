"""The grammar of tool calls in a model's own format, alone or with another answer, for llguidance: rules in
Lark, with schemas and other grammars as grammars of their own that the rules name."""

import re
from collections.abc import Callable, Mapping

import msgspec
from msgspec import structs

from runtime.grammar.choice_syntax import choices_as_regex
from runtime.grammar.json_schema import prepare_schema
from runtime.json_value import Fields
from runtime.messages.constraint import (
    INDEX,
    AnyText,
    CallForm,
    Calls,
    Choice,
    Ebnf,
    JsonObject,
    JsonSchema,
    Lark,
    PythonArguments,
    Regex,
)

_PYTHON = """\
start: (pair ("," SPACE? pair)*)?
pair: /[A-Za-z_][A-Za-z_0-9]*/ "=" value
value: STRING | NUMBER | "True" | "False" | "None" | list | dict
list: "[" (value ("," SPACE? value)*)? "]"
dict: "{" (item ("," SPACE? item)*)? "}"
item: STRING ":" SPACE? value
STRING: /'([^'\\\\\\n]|\\\\.)*'/ | /"([^"\\\\\\n]|\\\\.)*"/
NUMBER: /-?[0-9]+(\\.[0-9]+)?([eE][+-]?[0-9]+)?/
SPACE: /[ \\n]+/
"""

Part = JsonSchema | JsonObject | Regex | Ebnf | Choice | Lark | PythonArguments


class CallGrammar:
    """Writes one grammar. `special`: ids of the special tokens by their texts, which are matched by id;
    `json_options`: how llguidance writes JSON; `read_ebnf`: from GBNF to Lark, raises GrammarError."""

    def __init__(
        self, special: Mapping[str, int], json_options: Fields, read_ebnf: Callable[[str], str]
    ) -> None:
        self._special = special
        self._read_ebnf = read_ebnf
        self._json_options = json_options
        self._rules: list[str] = []
        self._parts: list[Fields] = []

    def write(self, calls: Calls) -> str:
        """The grammar as llguidance reads it. Raises GrammarError for a schema that cannot be kept."""
        if isinstance(calls.answer, AnyText):
            self._in_text(calls)
        else:
            whole = f"{self._list(calls, calls.before)} {self._literal(calls.after)}"
            answer = "" if calls.answer is None else f" | {self._part(calls.answer)}"
            self._rules.insert(0, f"start: {whole}{answer}")
        top = {"name": "top", "lark_grammar": "\n".join(self._rules)}
        return msgspec.json.encode({"grammars": [top, *self._parts]}).decode()

    def _in_text(self, calls: Calls) -> None:
        """AnyText text in which calls begin with a trigger."""
        trigger = calls.trigger
        # calls without anything around all of them are found one by one
        section = calls if calls.before else structs.replace(calls, is_single=True)
        first = self._list(section, calls.before, cut=len(trigger))
        self._rule("section", f"{first} {self._literal(calls.after)}")
        if trigger in self._special:
            self._rule("TEXT", "/(?s:.+)/")
            begin, text = f"TEXT? <[{self._special[trigger]}]>", "TEXT?"
        else:
            escaped = _escaped(trigger)
            self._rule("TEXT", f"/(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/")
            self._rule("before_call[lazy]", f"/(?s:.*){escaped}/")
            begin, text = "before_call", "TEXT"
        last = "" if calls.is_single else f"({begin} section)* {text}"
        self._rules.insert(0, f"start: {text} | {begin} section {last}")

    def _list(self, calls: Calls, before: str, cut: int = 0) -> str:
        """Symbols of one or more calls, with `before` the first, of which `cut` characters stand already.

        What stands between two calls is one text with what begins the second: of two texts that begin alike,
        the lexer takes the longer one."""
        first = self._any(calls, before, cut)
        return first if calls.is_single else f"{first} {self._any(calls, calls.between)}*"

    def _any(self, calls: Calls, before: str, cut: int = 0) -> str:
        forms = [self._form(form, (before + form.begin)[cut:]) for form in calls.forms]
        return self._rule(f"call_{len(self._rules)}", "\n  | ".join(forms))

    def _form(self, form: CallForm, begin: str) -> str:
        head = " /[0-9]+/ ".join([self._literal(text) for text in begin.split(INDEX)])
        if not isinstance(form.arguments, AnyText):
            return f"{head} {self._part(form.arguments)} {self._literal(form.end)}"
        texts = "".join(form.arguments.marks)
        marks = [piece for piece in self._split(texts) if piece in self._special]
        end = self._split(form.end)
        body = ""
        if marks:
            tokens = " | ".join([f"<[{self._special[mark]}]>" for mark in dict.fromkeys(marks)])
            body = f"(SOME | {tokens})*"
            self._rule("SOME", "/(?s:.+)/")
        elif end and end[0] in self._special:
            body = "SOME?"
            self._rule("SOME", "/(?s:.+)/")
        if end and end[0] not in self._special:
            upto = f"upto_{len(self._rules)}"
            self._rule(f"{upto}[lazy]", f"/(?s:.*){_escaped(end[0])}/")
            return f"{head} {body} {upto} {self._literal(''.join(end[1:]))}"
        return f"{head} {body} {self._literal(form.end)}"

    def _rule(self, name: str, body: str) -> str:
        text = f"{name}: {body}"
        if text not in self._rules:
            self._rules.append(text)
        return name

    def _split(self, text: str) -> list[str]:
        """`text` cut around the special tokens in it."""
        marks = sorted([mark for mark in self._special if mark and mark in text], key=len, reverse=True)
        if not marks:
            return [text] if text else []
        return [piece for piece in re.split(f"({'|'.join(map(re.escape, marks))})", text) if piece]

    def _literal(self, text: str) -> str:
        """The text as symbols of a rule; nothing for none."""
        return " ".join(
            [
                f"<[{self._special[piece]}]>"
                if piece in self._special
                else msgspec.json.encode(piece).decode()
                for piece in self._split(text)
            ]
        )

    def _part(self, part: Part) -> str:
        """The name of a grammar of its own."""
        match part:
            case JsonSchema(schema=text):
                fields: Fields = {"json_schema": self._schema(text)}
            case JsonObject():
                fields = {"json_schema": self._schema('{"type":"object"}')}
            case Regex(pattern=pattern):
                fields = {"lark_grammar": f"start: {slashed(pattern)}"}
            case Choice(choices=choices):
                pattern = choices_as_regex(msgspec.json.encode(choices).decode())
                fields = {"lark_grammar": f"start: {slashed(pattern)}"}
            case Ebnf(grammar=grammar):
                fields = {"lark_grammar": self._read_ebnf(grammar)}
            case Lark(grammar=grammar):
                fields = {"lark_grammar": grammar}
            case PythonArguments():
                fields = {"lark_grammar": _PYTHON}
        name = f"part{len(self._parts)}"
        self._parts.append({"name": name} | fields)
        return f"@{name}"

    def _schema(self, text: str) -> Fields:
        schema: Fields = msgspec.json.decode(prepare_schema(text, frozenset(), "llguidance"))
        return schema | {"x-guidance": self._json_options} if isinstance(schema, dict) else schema


def _escaped(text: str) -> str:
    """A text within a pattern."""
    return "".join([c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02x}" for c in text])


def slashed(pattern: str) -> str:
    """A regular expression between slashes."""
    slashed = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern, flags=re.DOTALL)
    return "/" + slashed.replace("\n", "\\n") + "/"
