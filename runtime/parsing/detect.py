"""Which formats a model's answers are in: as --tool-call-parser and --reasoning-parser say, or as its chat
template shows."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from msgspec import Struct, structs

from runtime.errors import OptionsError
from runtime.parsing.answer import Format, Parser, Thinking
from runtime.parsing.channels import FRAMINGS, ChannelParser
from runtime.parsing.formats import FORMATS, THINKING
from runtime.parsing.items import Json
from runtime.parsing.typed import Tools

# a list of calls and nothing else: what answers are held to where a call is demanded, whatever the model's
# own format is
DEMANDED = Format(items=(Json(begins=("[",)),), at_start=("[",))

_OWN = "reads a template of answers that a model brings in its own files, which is not read here"
LATER = {  # names that the references have, and why they are not here
    "beam": _OWN,
    "response_template": _OWN,
    "telechat4": "is a format of which nothing public says how it is written",
}

# vLLM's names, where they are others than with - for _ or without it
_ALSO = {
    "openai": "gpt-oss",
    "openai_gptoss": "gpt-oss",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "functiongemma": "gemma",
    "phi4_mini_json": "phi4",
    "granite4": "granite",
    "internlm": "interns1",
    "intern_s1": "interns1",
    "hunyuan_a13b": "hunyuan",
    "hy_v3": "hunyuan",
    "muse_glimmer": "muse",
    "nemotron_v3": "nemotron_3",
    "apertus": "apertus2509",
    "glm47": "glm45",
    "holo2": "deepseek-v3",
    "olmo3": "deepseek-v3",
    "minimax_m2_append_think": "minimax-append-think",
}

# marks in a template -> the format that has them; the first row of which all are there counts
_TOOLS: tuple[tuple[str, Sequence[str]], ...] = (
    ("gpt-oss", ("<|channel|>", "to=functions.")),
    ("muse", ("<atem:",)),
    ("iquest_q1", ("<iquest_tool_call>",)),
    ("gigachat35", ("<｜GCML｜",)),
    ("gigachat3", ("<|role_sep|>", "function call")),
    ("gigachat3", ("<|function_call|>",)),
    ("k2_horizon", ("<ifm|tool_call>",)),
    ("apertus2509", ("<|tools_prefix|>",)),
    ("dots", ("<dots_function_call>",)),
    ("inkling", ("<|content_invoke_tool_json|>",)),
    ("kimi_k3", ("<|open|>", "tools<|sep|>")),
    ("minimax-m3", ("]<]minimax[>[",)),
    ("deepseekv41", ("｜DSML｜ calls>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseekv4", ("｜DSML｜", "tool_calls>")),
    ("deepseekv32", ("｜DSML｜",)),
    ("deepseekv3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁call▁begin｜>",)),
    ("step3", ("<｜tool_calls_begin｜>",)),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("hunyuan", ("<tool_sep",)),
    ("glm45", ("<arg_key>",)),
    ("minicpm5", ("<function name=", "<param name=")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("ernie45", ("<tool_call>", "<response>")),
    ("hermes", ("<tool_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("gemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("cohere_command4", ("<|START_ACTION|>",)),
    ("interns1", ("<|action_start|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("phi4", ("<|/tool_call|>",)),
    ("phi4", ("<|/tool|>",)),
    ("granite", ("<|tool_call|>",)),
    ("hunyuan", ("<tool_calls>",)),
    ("pythonic", ("<|python_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("pythonic", ("func_name1(params_name1=",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('"parameters": dictionary of argument name',)),
)
_THINKING: tuple[tuple[str, Sequence[str]], ...] = (
    ("gpt-oss", ("<|channel|>analysis",)),
    ("muse", ("<atem:", "to=self")),
    ("apertus2509", ("<|inner_prefix|>",)),
    ("inkling", ("<|content_thinking|>",)),
    ("k2_horizon", ("<ifm|think",)),
    ("kimi_k3", ("<|open|>", "think<|sep|>")),
    ("minimax-m3", ("<mm:think>",)),
    ("iquest_q1", ("<think>", "<iquest_")),
    ("hunyuan", ("<think:",)),
    ("hunyuan", ("<think>", "<tool_calls>")),
    ("gemma4", ("<|channel>thought",)),
    ("mistral", ("[THINK]",)),
    ("kimi", ("◁think▷",)),
    ("seed_oss", ("<seed:think>",)),
    ("cohere_command4", ("<|START_THINKING|>",)),
    ("kimi_k2", ("<think>", "<|tool_calls_section_begin|>")),
    ("glm45", ("<think>", "<arg_key>")),
    ("ernie45", ("<think>", "<response>")),
    ("qwen3", ("<think>", "<tool_call>")),
    ("deepseek-v3", ("<think>",)),
)


class Formats(Struct, frozen=True):
    """Names of formats; None: answers are text as it stands. `is_told`: somebody has said that the model
    thinks."""

    tools: str | None = None
    thinking: str | None = None
    is_told: bool = False

    @property
    def reasoning(self) -> Thinking | None:
        return THINKING.get(self.thinking or "")

    @property
    def calls(self) -> Format | None:
        return FORMATS.get(self.tools or "")


@cache
def marks_of(tools: str | None, thinking: str | None) -> tuple[str, ...]:
    """All that the two declarations name: special tokens in it are text for whoever reads such answers."""
    framings = [FRAMINGS[name] for name in (tools, thinking) if name in FRAMINGS]
    marks = [mark for framing in framings for mark in framing.marks]
    rows = (FORMATS.get(tools or ""), THINKING.get(thinking or ""), *[framing.calls for framing in framings])
    return tuple(dict.fromkeys([*marks, *[text for row in rows if row is not None for text in _texts(row)]]))


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            if value:
                yield value
        case tuple():
            for part in value:
                yield from _texts(part)
        case Struct():
            for name, part in structs.asdict(value).items():
                if name != "models":
                    yield from _texts(part)


def choose(tools: str, thinking: str, template: str) -> Formats:
    """`tools` and `thinking` are names, "none", or "auto": what the chat template shows. Raises
    OptionsError."""
    tools, thinking = _ours(tools, FORMATS), _ours(thinking, THINKING)
    for flag, name, known in (
        ("--tool-call-parser", tools, FORMATS),
        ("--reasoning-parser", thinking, THINKING),
    ):
        if name in ("auto", "none", *FRAMINGS, *known):
            continue
        if name in LATER:
            raise OptionsError(
                [f"{flag} {name} {LATER[name]}; choose none to get the text as the model writes it"]
            )
        near = get_close_matches(name, [*FRAMINGS, *known], n=3)
        there = ", ".join(["auto", "none", *FRAMINGS, *known])
        raise OptionsError(
            [
                f"{flag} {name} is unknown; "
                + (f"did you mean {' or '.join(near)}?" if near else f"there are {there}")
            ]
        )
    return Formats(
        _named(tools, _TOOLS, template),
        _named(thinking, _THINKING, template),
        thinking not in ("auto", "none"),
    )


def _ours(name: str, known: Iterable[str]) -> str:
    """The name here of a format that another runtime calls so."""
    names = {"auto", "none", *FRAMINGS, *known}
    if name in names:
        return name
    if (other := _ALSO.get(name)) in names:
        return other
    return {_bare(ours): ours for ours in sorted(names)}.get(_bare(name), name)


def _bare(name: str) -> str:
    return name.replace("-", "").replace("_", "")


def _named(name: str, rows: tuple[tuple[str, Sequence[str]], ...], template: str) -> str | None:
    if name == "auto":
        return next((format for format, marks in rows if all(mark in template for mark in marks)), None)
    return None if name == "none" else name


def open_parser(
    formats: Formats, tools: Tools, tail: str, *, is_continued: bool = False, is_demanded: bool = False
) -> Parser | ChannelParser:
    """The parser of one answer. Without `tools` nothing is a call. `tail` ends the prompt."""
    if not is_demanded:
        for name in (formats.thinking, formats.tools if tools else None):
            if name in FRAMINGS:
                return ChannelParser(
                    FRAMINGS[name],
                    tools,
                    separates=formats.thinking == name,
                    calls=bool(tools) and formats.tools == name,
                )
    thinking = formats.reasoning
    form = DEMANDED if is_demanded else formats.calls if tools else None
    return Parser(form, thinking, tools, thinking is not None and thinking.is_open(tail, is_continued))
