"""How the calls of each tool-call format are put together, for grammars that hold answers to them.

Formats of channel_parser.py have none: their calls are messages, which a grammar of the final message leaves
free.
"""

from typing import Literal

from msgspec import Struct

from runtime.parsing.tool_call_formats import M3_PREFIX

NAME, INDEX, KEY = "NAME", "INDEX", "KEY"


class CallFrame(Struct, frozen=True):
    """The texts around calls. NAME stands for the function's name, INDEX for a number, KEY for a
    parameter."""

    begin: str  # before the arguments of each call
    end: str  # behind them
    before: str = ""  # before the first call
    between: str = "\n"
    after: str = ""  # behind the last call
    # arguments are a JSON object, those of a call in Python, or any text up to `end`; or a call is an object
    # with `name` and `parameters`, which may begin as another answer does
    body: Literal["json", "python", "free", "object"] = "json"
    text: tuple[str, str] = ("", "")  # in a free body, around the text of the parameter KEY
    trigger: str = ""  # what `before` and `begin` begin with and no text has; "": there is no such text


def _object(before: str, after: str, name: str = "name", arguments: str = "arguments") -> CallFrame:
    """One JSON object in each section."""
    return CallFrame(f'{before}{{"{name}": "NAME", "{arguments}": ', "}" + after, trigger=before.rstrip("\n"))


def _list(before: str, after: str, name: str = "name", arguments: str = "arguments") -> CallFrame:
    """A JSON list of objects in one section."""
    return CallFrame(
        f'{{"{name}": "NAME", "{arguments}": ',
        "}",
        before=before + "[",
        between=", ",
        after="]" + after,
        trigger=before.rstrip("\n"),
    )


def _coder(section: str) -> CallFrame:
    return CallFrame(
        f"<{section}>\n<function=NAME>",
        f"</function>\n</{section}>",
        body="free",
        text=("\n<parameter=KEY>\n", "\n</parameter>\n"),
        trigger=f"<{section}>",
    )


def _pairs(section: str) -> CallFrame:
    return CallFrame(
        f"<{section}>NAME",
        f"</{section}>",
        body="free",
        text=("\n<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
        trigger=f"<{section}>",
    )


def _invoke(outer: tuple[str, str], mark: str, says: str = "", between: str = "\n") -> CallFrame:
    """Elements `invoke` and `parameter`, with `mark` before their names."""
    return CallFrame(
        f'<{mark}invoke name="NAME">',
        f"</{mark}invoke>",
        before=outer[0],
        between=between,
        after=outer[1],
        body="free",
        text=(f'\n<{mark}parameter name="KEY"{says}>', f"</{mark}parameter>\n"),
        trigger=outer[0].rstrip("\n"),
    )


def _dsml(mark: str, outer: str) -> CallFrame:
    return _invoke((f"<{mark}{outer}>\n", f"\n</{mark}{outer}>"), mark, ' string="true"')


def _bare(begin: str, end: str, quote: str) -> CallFrame:
    return CallFrame(
        begin + "call:NAME{", "}" + end, between="", body="free", text=("KEY:" + quote, quote), trigger=begin
    )


def _deepseek(begin: str, end: str, between: str) -> CallFrame:
    return CallFrame(
        begin,
        end,
        before="<｜tool▁calls▁begin｜>",
        between=between,
        after="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    )


_HERMES = _object("<tool_call>\n", "\n</tool_call>")
_CODER = _coder("tool_call")
_GLM = _pairs("tool_call")
_DSML = "｜DSML｜"
_STEP_END = "<｜tool_call_end｜>"

CALL_FRAMES: dict[str, CallFrame] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "trinity", "ernie45"), _HERMES),
    **dict.fromkeys(("qwen3_coder", "step3p5", "mimo", "nanbeige"), _CODER),
    **dict.fromkeys(("glm", "glm45", "glm47", "ling3", "poolside_v1", "spark25"), _GLM),
    "llama3": CallFrame("", "", between="; ", body="object"),
    "pythonic": CallFrame("NAME(", ")", before="[", between=", ", after="]", body="python"),
    "mistral": CallFrame("[TOOL_CALLS]NAME[ARGS]", "", between="", trigger="[TOOL_CALLS]"),
    "deepseekv3": _deepseek(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>", "\n"
    ),
    "deepseekv31": _deepseek("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>", ""),
    "deepseekv32": _dsml(_DSML, "function_calls"),
    "deepseekv4": _dsml(_DSML, "tool_calls"),
    "deepseekv41": _dsml(_DSML + " ", "calls"),
    "kimi_k2": CallFrame(
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        between="",
        after="<|tool_calls_section_end|>",
        trigger="<|tool_calls_section_begin|>",
    ),
    "step3": CallFrame(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">',
        "</steptml:invoke>" + _STEP_END,
        before="<｜tool_calls_begin｜>",
        after="<｜tool_calls_end｜>",
        body="free",
        text=('\n<steptml:parameter name="KEY">', "</steptml:parameter>\n"),
        trigger="<｜tool_calls_begin｜>",
    ),
    "minimax-m2": _invoke(("<minimax:tool_call>\n", "\n</minimax:tool_call>"), ""),
    "minimax-m3": CallFrame(
        f'{M3_PREFIX}<invoke name="NAME">',
        f"{M3_PREFIX}</invoke>",
        before=f"{M3_PREFIX}<tool_call>\n",
        after=f"\n{M3_PREFIX}</tool_call>",
        body="free",
        text=(f"{M3_PREFIX}<KEY>", f"{M3_PREFIX}</KEY>"),
        trigger=f"{M3_PREFIX}<tool_call>",
    ),
    "seed_oss": _coder("seed:tool_call"),
    "gemma": _bare("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _bare("<|tool_call>", "<tool_call|>", '<|"|>'),
    "phi4": _list("functools", ""),
    "granite": _list("<|tool_call|>", ""),
    "interns1": _object("<|action_start|><|plugin|>\n", "<|action_end|>", arguments="parameters"),
    "hunyuan": _list("<tool_calls>", "</tool_calls>"),
    "jamba": _list("<tool_calls>\n", "\n</tool_calls>"),
    "lfm2": CallFrame(
        "NAME(",
        ")",
        before="<|tool_call_start|>[",
        between=", ",
        after="]<|tool_call_end|>",
        body="python",
        trigger="<|tool_call_start|>",
    ),
    "cohere_command4": _list("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    "gigachat3": _object("<|function_call|>", "<|message_sep|>"),
    "gigachat35": _dsml("｜GCML｜", "tool_calls"),
    "apertus2509": CallFrame(
        '{"NAME": ',
        "}",
        before="<|tools_prefix|>[",
        between=", ",
        after="]<|tools_suffix|>",
        trigger="<|tools_prefix|>",
    ),
    "dots": _invoke(("<dots_function_call>\n", "\n</dots_function_call>"), ""),
    "inkling": CallFrame(
        '<|message_model|>NAME<|content_invoke_tool_json|>{"name": "NAME", "args": ',
        "}<|end_message|>",
        between="",
    ),
    "k2_horizon": CallFrame(
        "<ifm|tool_call>NAME\n",
        "</ifm|tool_call>",
        before="<ifm|tool_calls>\n",
        after="\n</ifm|tool_calls>",
        body="free",
        text=("<ifm|arg_key>KEY</ifm|arg_key>\n<ifm|arg_value>", "</ifm|arg_value>\n"),
        trigger="<ifm|tool_calls>",
    ),
    "kimi_k3": CallFrame(
        '<|open|>call tool="NAME" index="INDEX"<|sep|>',
        "<|close|>call<|sep|>",
        before="<|open|>tools<|sep|>",
        between="",
        after="<|close|>tools<|sep|>",
        body="free",
        text=('<|open|>argument key="KEY" type="string"<|sep|>', "<|close|>argument<|sep|>"),
    ),
    "iquest_q1": _pairs("iquest_tool_call"),
    "longcat": _object("<longcat_tool_call>", "</longcat_tool_call>"),
    "olmo3": CallFrame(
        "NAME(",
        ")",
        before="<function_calls>",
        after="</function_calls>",
        body="python",
        trigger="<function_calls>",
    ),
    "minicpm5": CallFrame(
        '<function name="NAME">',
        "</function>",
        body="free",
        text=('\n<param name="KEY">', "</param>\n"),
        trigger='<function name="',
    ),
}
