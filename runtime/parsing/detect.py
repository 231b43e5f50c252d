"""The formats of a model's answers: those that --tool-call-parser and --reasoning-parser name, or those that
its chat template shows."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache

from msgspec import Struct, structs

from runtime.errors import OptionsError
from runtime.parsing.answer_parser import Parser, ReasoningFormat, ToolCallFormat
from runtime.parsing.call_syntax import JsonCalls
from runtime.parsing.channel_parser import CHANNEL_FORMATS, ChannelParser
from runtime.parsing.reasoning_formats import REASONING_FORMATS
from runtime.parsing.schema_types import Tools
from runtime.parsing.tool_call_formats import TOOL_CALL_FORMATS

# a JSON list of calls and nothing else: the form of answers for which tool_choice requires a call, whatever
# the model's own format is
REQUIRED_CALLS = ToolCallFormat(syntaxes=(JsonCalls(begins=("[",)),), at_start=("[",))

_OWN_TEMPLATE = "reads a template of answers that a model brings in its own files, which is not read here"
UNSUPPORTED = {  # names of SGLang and vLLM that are not supported here, and why
    "beam": _OWN_TEMPLATE,
    "response_template": _OWN_TEMPLATE,
    "telechat4": "is a format of which nothing public says how it is written",
}

# names of other runtimes, where they differ by more than - and _
OTHER_NAMES = {
    "llama": "llama3",
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

# format and markers: the first row counts whose markers are all in the chat template
TOOL_CALL_MARKERS: tuple[tuple[str, Sequence[str]], ...] = (
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
REASONING_MARKERS: tuple[tuple[str, Sequence[str]], ...] = (
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


class AnswerFormats(Struct, frozen=True):
    """Names of the formats of a model's answers; None: that part of an answer is text as it stands."""

    tool_calls: str | None = None
    reasoning: str | None = None
    is_explicit: bool = False  # --reasoning-parser names the format; False: the chat template shows it

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The declaration; None also for channel formats (channel_parser.py)."""
        return REASONING_FORMATS.get(self.reasoning or "")

    @property
    def tool_call_format(self) -> ToolCallFormat | None:
        """The declaration; None also for channel formats (channel_parser.py)."""
        return TOOL_CALL_FORMATS.get(self.tool_calls or "")


@cache
def markers_of(tool_calls: str | None, reasoning: str | None) -> tuple[str, ...]:
    """All texts of the two declarations. Special tokens among them must be decoded as text for a parser of
    such answers."""
    channel_formats = [CHANNEL_FORMATS[name] for name in (tool_calls, reasoning) if name in CHANNEL_FORMATS]
    marks = [mark for channel_format in channel_formats for mark in channel_format.markers]
    rows = (
        TOOL_CALL_FORMATS.get(tool_calls or ""),
        REASONING_FORMATS.get(reasoning or ""),
        *[channel_format.calls for channel_format in channel_formats],
    )
    return tuple(
        dict.fromkeys([*marks, *[text for row in rows if row is not None for text in _strings(row)]])
    )


def _strings(value: object) -> Iterator[str]:
    match value:
        case str():
            if value:
                yield value
        case tuple():
            for part in value:
                yield from _strings(part)
        case Struct():
            for name, part in structs.asdict(value).items():
                if name != "models":
                    yield from _strings(part)


def select_formats(tool_calls: str, reasoning: str, template: str) -> AnswerFormats:
    """`tool_calls` and `reasoning` are names of formats, "none", or "auto" for the formats that the chat
    template shows. Raises OptionsError for unknown names."""
    tool_calls, reasoning = _our_name(tool_calls, TOOL_CALL_FORMATS), _our_name(reasoning, REASONING_FORMATS)
    for flag, name, known in (
        ("--tool-call-parser", tool_calls, TOOL_CALL_FORMATS),
        ("--reasoning-parser", reasoning, REASONING_FORMATS),
    ):
        if name in ("auto", "none", *CHANNEL_FORMATS, *known):
            continue
        if name in UNSUPPORTED:
            raise OptionsError(
                [f"{flag} {name} {UNSUPPORTED[name]}; choose none to get the text as the model writes it"]
            )
        near = get_close_matches(name, [*CHANNEL_FORMATS, *known], n=3)
        there = ", ".join(["auto", "none", *CHANNEL_FORMATS, *known])
        raise OptionsError(
            [
                f"{flag} {name} is unknown; "
                + (f"did you mean {' or '.join(near)}?" if near else f"there are {there}")
            ]
        )
    return AnswerFormats(
        _by_name_or_template(tool_calls, TOOL_CALL_MARKERS, template),
        _by_name_or_template(reasoning, REASONING_MARKERS, template),
        reasoning not in ("auto", "none"),
    )


def _our_name(name: str, known: Iterable[str]) -> str:
    """The name here of a format that another runtime calls by this name."""
    names = {"auto", "none", *CHANNEL_FORMATS, *known}
    if name in names:
        return name
    if (other := OTHER_NAMES.get(name)) in names:
        return other
    return {_bare(ours): ours for ours in sorted(names)}.get(_bare(name), name)


def _bare(name: str) -> str:
    return name.replace("-", "").replace("_", "")


def _by_name_or_template(name: str, rows: tuple[tuple[str, Sequence[str]], ...], template: str) -> str | None:
    if name == "auto":
        return next((format for format, marks in rows if all(mark in template for mark in marks)), None)
    return None if name == "none" else name


def open_parser(
    formats: AnswerFormats, tools: Tools, tail: str, *, is_continued: bool = False, is_required: bool = False
) -> Parser | ChannelParser:
    """The parser of one answer. Without `tools` nothing is a call. `tail`: the end of the prompt;
    `is_continued`: the prompt holds the beginning of the answer; `is_required`: the answer is a JSON list of
    calls, as tool_choice requires."""
    if not is_required:
        for name in (formats.reasoning, formats.tool_calls if tools else None):
            if name in CHANNEL_FORMATS:
                return ChannelParser(
                    CHANNEL_FORMATS[name],
                    tools,
                    separates=formats.reasoning == name,
                    calls=bool(tools) and formats.tool_calls == name,
                )
    reasoning = formats.reasoning_format
    form = REQUIRED_CALLS if is_required else formats.tool_call_format if tools else None
    return Parser(form, reasoning, tools, reasoning is not None and reasoning.is_open(tail, is_continued))
