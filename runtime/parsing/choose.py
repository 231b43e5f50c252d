"""Which formats a model's answers are in: as --tool-call-parser and --reasoning-parser say, or as its chat template shows."""

from collections.abc import Sequence

from msgspec import Struct

from runtime.errors import OptionsError
from runtime.parsing.answer import Format, Parser, Thinking
from runtime.parsing.channels import ChannelParser
from runtime.parsing.formats import FORMATS, THINKING
from runtime.parsing.items import Json
from runtime.parsing.typed import Tools

CHANNELS = "gpt-oss"  # the name of channels.py among the formats
# a list of calls and nothing else: what answers are held to where a call is demanded, whatever the model's own format is
DEMANDED = Format(items=(Json(begins=("[",)),), at_start=("[",))

# marks in a template -> the format that has them; the first row of which all are there counts
_TOOLS: tuple[tuple[str, Sequence[str]], ...] = (
    (CHANNELS, ("<|channel|>", "to=functions.")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseekv4", ("｜DSML｜", "tool_calls>")),
    ("deepseekv32", ("｜DSML｜",)),
    ("deepseekv3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseekv31", ("<｜tool▁call▁begin｜>",)),
    ("step3", ("<｜tool_calls_begin｜>",)),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("gemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("cohere_command4", ("<|START_ACTION|>",)),
    ("interns1", ("<|action_start|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("phi4", ("<|/tool_call|>",)),
    ("granite", ("<|tool_call|>",)),
    ("hunyuan", ("<tool_calls>",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3", ("<|python_tag|>",)),
)
_THINKING: tuple[tuple[str, Sequence[str]], ...] = (
    (CHANNELS, ("<|channel|>analysis",)),
    ("gemma4", ("<|channel>thought",)),
    ("mistral", ("[THINK]",)),
    ("kimi", ("◁think▷",)),
    ("kimi_k2", ("<think>", "<|tool_calls_section_begin|>")),
    ("glm45", ("<think>", "<arg_key>")),
    ("qwen3", ("<think>", "<tool_call>")),
    ("deepseek-v3", ("<think>",)),
)


class Formats(Struct, frozen=True):
    """Names of formats; None: answers are text as it stands. `is_told`: somebody has said that the model thinks."""

    tools: str | None = None
    thinking: str | None = None
    is_told: bool = False

    @property
    def thoughts(self) -> Thinking | None:
        return THINKING.get(self.thinking or "")

    @property
    def calls(self) -> Format | None:
        return FORMATS.get(self.tools or "")

    def has_special(self, *, with_tools: bool) -> bool:
        """Whether some of the markers may be special tokens, which text leaves out otherwise."""
        if CHANNELS in (self.thinking, self.tools if with_tools else None):
            return True
        calls = self.calls if with_tools else None
        return any(form is not None and form.has_special for form in (self.thoughts, calls))


def choose(tools: str, thinking: str, template: str) -> Formats:
    """`tools` and `thinking` are names, "none", or "auto": what the chat template shows. Raises OptionsError."""
    for flag, name, known in (("--tool-call-parser", tools, FORMATS), ("--reasoning-parser", thinking, THINKING)):
        if name not in ("auto", "none", CHANNELS, *known):
            raise OptionsError([f"{flag} {name} is unknown; there are auto, none, {CHANNELS}, {', '.join(known)}"])
    return Formats(_named(tools, _TOOLS, template), _named(thinking, _THINKING, template), thinking not in ("auto", "none"))


def _named(name: str, rows: tuple[tuple[str, Sequence[str]], ...], template: str) -> str | None:
    if name == "auto":
        return next((format for format, marks in rows if all(mark in template for mark in marks)), None)
    return None if name == "none" else name


def open_parser(formats: Formats, tools: Tools, tail: str, *, is_continued: bool = False,
                is_demanded: bool = False) -> Parser | ChannelParser:
    """The parser of one answer. Without `tools` nothing is a call. `tail` ends the prompt."""
    if CHANNELS in (formats.thinking, formats.tools if tools else None) and not is_demanded:
        return ChannelParser(separates=formats.thinking == CHANNELS, calls=bool(tools))
    thinking = formats.thoughts
    form = DEMANDED if is_demanded else formats.calls if tools else None
    return Parser(form, thinking, tools, thinking is not None and thinking.is_open(tail, is_continued))
