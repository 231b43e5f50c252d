"""A Jinja sandbox for templates that come with a model, with time bounded.

Time is counted, not measured: each turn of a loop and each call of a macro takes one of the render's
`MAX_TURNS`, so the same conversation gives the same result on a slow machine. Ranges, repeated values and
powers are bounded as well. A template that fills the memory by doubling a string is not stopped: templates
come with the model, and clients cannot send one.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 1_000_000  # two seconds or so
MAX_WIDTH = 1 << 20  # characters or items that one operation may make
TURN = "runtime_turn"  # what a counted loop calls; a variable of each render


class Turns:
    """Counts down the turns that a render may still take."""

    def __init__(self) -> None:
        self.left = MAX_TURNS

    def __call__(self) -> str:
        self.left -= 1
        if self.left < 0:
            raise TemplateRuntimeError(f"it takes more than {MAX_TURNS} turns of its loops")
        return ""


class CountedLoops(CodeGenerator):
    """Compiles templates whose loops and macros call TURN first."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        """Adds the calls, then compiles as usual."""
        for part in node.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            turn = nodes.Output([nodes.Call(nodes.Name(TURN, "load"), [], [], None, None)])
            part.body.insert(0, turn.set_lineno(part.lineno))
            part.body[0].set_environment(self.environment)
        super().visit_Template(node, frame)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers' apply_chat_template extends it: trimmed blocks, break and continue, `tojson`
    without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`."""

    code_generator_class = CountedLoops
    intercepted_binops = frozenset({"*", "**", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda format: datetime.now().strftime(format),
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Bounds repetitions and powers."""
        # some templates (DeepSeek's) join the arguments of calls to text: they were written for arguments as
        # JSON
        if operator == "+":
            if isinstance(left, str) and isinstance(right, dict):
                return left + _tojson(right)
            return (
                _tojson(left) + right if isinstance(left, dict) and isinstance(right, str) else left + right
            )
        if operator == "*" and _width(left) * _times(right) + _width(right) * _times(left) > MAX_WIDTH:
            raise TemplateRuntimeError(f"it repeats a value to more than {MAX_WIDTH} items")
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise TemplateRuntimeError("it takes a power of large numbers")
        return super().call_binop(context, operator, left, right)


def _width(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _times(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0


def _is_small(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) <= 1024


class _Generation(Extension):
    """`{% generation %}` marks the model's own words for training; here its body is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
