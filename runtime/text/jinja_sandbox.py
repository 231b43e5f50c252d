"""A Jinja sandbox for templates that come with a model, with time and memory bounded.

Time is counted, not measured: each turn of a loop and each call of a macro takes one of the render's
`MAX_TURNS`, so the same conversation gives the same result on a slow machine. What makes a long value of a
short one (repetitions, powers, widths of formats and of padding, joined and replaced texts) is bounded
before it is made (jinja_bounds.py); that holds for the constants that Jinja computes when it compiles, too.
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.gil import give_way
from runtime.json_value import chars_within
from runtime.text import jinja_bounds as bounds

MAX_TURNS = 1_000_000  # two seconds or so
LONG_JSON = 1 << 18  # characters; more become JSON value by value, as one call would hold the interpreter
TURN = "runtime_turn"  # what a counted loop calls; a variable of each render


class Turns:
    """Counts down the turns that a render may still take."""

    def __init__(self) -> None:
        self.left = MAX_TURNS

    def __call__(self) -> str:
        give_way()
        self.left -= 1
        if self.left < 0:
            raise TemplateRuntimeError(f"it takes more than {MAX_TURNS} turns of its loops")
        return ""


class CountedLoops(CodeGenerator):
    """Compiles templates whose loops and macros call TURN first."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """Adds the calls, then compiles as usual."""
        for part in node.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            turn = nodes.Output([nodes.Call(nodes.Name(TURN, "load"), [], [], None, None)])
            assert isinstance(part, nodes.For | nodes.Macro | nodes.CallBlock)
            turn.set_lineno(part.lineno).set_environment(self.environment)
            part.body.insert(0, turn)
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b` as Sandbox.joined."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers' apply_chat_template extends it: trimmed blocks, break and continue, `tojson`
    without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`."""

    code_generator_class = CountedLoops
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        for name, check in bounds.FILTERS.items():
            self.filters[name] = bounds.checked(self.filters[name], check)
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda format: datetime.now().strftime(format),
        }

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Bounds what grows."""
        # some templates (DeepSeek's) join the arguments of calls to text: they were written for arguments as
        # JSON
        if operator == "+":
            if isinstance(left, str) and isinstance(right, dict):
                return left + _tojson(right)
            if isinstance(left, dict) and isinstance(right, str):
                return _tojson(left) + right
        bounds.BINARY[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: object, /, *args: object, **kwargs: object) -> object:
        """Bounds what methods of texts make."""
        bounds.check_method(function, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """Bounds the widths of `format` and `format_map`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None or not isinstance(value, MethodType | BuiltinMethodType):
            return wrapped
        form = value.__self__
        assert isinstance(form, str)
        return bounds.checked(wrapped, lambda *_, **__: bounds.check_format(form))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The text of a block that a template keeps in a variable."""
        return bounds.join(parts)

    @staticmethod
    def joined(parts: Iterable[object]) -> str:
        """The texts of some values, joined."""
        return bounds.join(map(str, parts))


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training; here its body is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    bounds.check_width(indent)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if chars_within(value, LONG_JSON) <= LONG_JSON:
        return encoder.encode(value)
    parts = []
    for part in encoder.iterencode(value):
        give_way()
        parts.append(part)
    return "".join(parts)
