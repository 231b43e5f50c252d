"""Writes calls as each format has them, the way of the models' own templates."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.parsing.channel_parser import CHANNEL_FORMATS
from runtime.parsing.tool_call_formats import TOOL_CALL_FORMATS

Call = tuple[str, Mapping[str, Any]]
DSML = "｜DSML｜"


def text_of(value: Any) -> str:
    """Markup writes strings as they are and the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def objects(calls: Sequence[Call], name: str = "name", arguments: str = "arguments") -> list[str]:
    return [json.dumps({name: function, arguments: values}, ensure_ascii=False) for function, values in calls]


def tags(
    begin: str,
    name_end: str,
    key: str,
    key_end: str,
    value_end: str,
    end: str,
    says: bool = False,
    line: str = "",
) -> Callable[[Call], str]:
    def write(call: Call) -> str:
        parts = [begin + call[0] + name_end]
        for name, value in call[1].items():
            is_string = f'" string="{"true" if isinstance(value, str) else "false"}' if says else ""
            parts.append(key + name + is_string + key_end + line + text_of(value) + line + value_end)
        return "\n".join([*parts, end])

    return write


def python(calls: Sequence[Call]) -> str:
    return (
        "["
        + ", ".join(
            [
                f"{name}({', '.join([f'{key}={value!r}' for key, value in values.items()])})"
                for name, values in calls
            ]
        )
        + "]"
    )


def bare(value: Any, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case dict():
            return "{" + ",".join([f"{key}:{bare(inner, quote)}" for key, inner in value.items()]) + "}"
        case list():
            return "[" + ",".join([bare(inner, quote) for inner in value]) + "]"
    return json.dumps(value)


def bares(begin: str, end: str, quote: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: "".join(
        [f"{begin}call:{name}{bare(dict(values), quote)}{end}" for name, values in calls]
    )


def wrapped(
    begin: str, end: str, write: Callable[[Call], str], between: str = "\n"
) -> Callable[[Sequence[Call]], str]:
    return lambda calls: begin + between.join([write(call) for call in calls]) + end


def each(begin: str, end: str, write: Callable[[Call], str]) -> Callable[[Sequence[Call]], str]:
    return lambda calls: "\n".join([begin + write(call) + end for call in calls])


def listed(
    begin: str, end: str, name: str = "name", arguments: str = "arguments"
) -> Callable[[Sequence[Call]], str]:
    return lambda calls: begin + "[" + ", ".join(objects(calls, name, arguments)) + "]" + end


def invoke(mark: str, says: bool) -> Callable[[Call], str]:
    return tags(
        f'<{mark}invoke name="',
        '">',
        f'<{mark}parameter name="',
        '">',
        f"</{mark}parameter>",
        f"</{mark}invoke>",
        says,
    )


def plain(call: Call) -> str:
    return json.dumps(call[1], ensure_ascii=False)


def one(call: Call) -> str:
    return objects([call])[0]


_coder = tags("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", line="\n")
_hermes = each("<tool_call>\n", "\n</tool_call>", one)
_qwen_coder = each("<tool_call>\n", "\n</tool_call>", _coder)
_pairs = tags("", "", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "")
_glm = each("<tool_call>", "</tool_call>", _pairs)
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _typed(call: Call) -> str:
    """A call of Kimi-K3, which names the type of every value."""
    kinds = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    parts = [
        f'<|open|>argument key="{key}" '
        f'type="{kinds[type(value)]}"<|sep|>{text_of(value)}<|close|>argument<|sep|>'
        for key, value in call[1].items()
    ]
    return f'<|open|>call tool="{call[0]}" index="1"<|sep|>{"".join(parts)}<|close|>call<|sep|>'


def typed(call: Call) -> str:
    parts = [
        f"<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>{text_of(value)}</ifm|arg_value>\n"
        for key, value in call[1].items()
    ]
    return f"<ifm|tool_call>{call[0]}\n{''.join(parts)}</ifm|tool_call>"


M3 = "]<]minimax[>["


def nested(value: Any) -> str:
    match value:
        case dict():
            return "".join([f"{M3}<{key}>{nested(inner)}{M3}</{key}>" for key, inner in value.items()])
        case list():
            return nested_items(value)
    return text_of(value)


def nested_items(values: Sequence[Any]) -> str:
    return "".join([f"{M3}<item>{nested(inner)}{M3}</item>" for inner in values])


def kimi(calls: Sequence[Call]) -> str:
    parts = [
        f"<|tool_call_begin|>functions.{call[0]}:{i}<|tool_call_argument_begin|>{plain(call)}<|tool_call_end|"
        ">"
        for i, call in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(parts) + "<|tool_calls_section_end|>"


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "trinity"), _hermes),
    **dict.fromkeys(("qwen3_coder", "step3p5", "mimo", "nanbeige"), _qwen_coder),
    **dict.fromkeys(("glm", "glm45", "glm47", "ling3", "poolside_v1", "spark25"), _glm),
    "llama3": lambda calls: "; ".join(objects(calls, arguments="parameters")),
    "pythonic": python,
    "mistral": lambda calls: "".join([f"[TOOL_CALLS]{call[0]}[ARGS]{plain(call)}" for call in calls]),
    "deepseekv3": wrapped(*_CALLS, lambda call: _V3.format(call[0], plain(call))),
    "deepseekv31": wrapped(*_CALLS, lambda call: _V31.format(call[0], plain(call)), ""),
    "deepseekv32": wrapped(f"<{DSML}function_calls>\n", f"\n</{DSML}function_calls>", invoke(DSML, True)),
    "deepseekv4": wrapped(f"<{DSML}tool_calls>\n", f"\n</{DSML}tool_calls>", invoke(DSML, True)),
    "kimi_k2": kimi,
    "step3": wrapped(
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        lambda call: "".join(
            [
                "<｜tool_call_begin｜>function<｜tool_sep｜>",
                invoke("steptml:", False)(call),
                "<｜tool_call_end｜>",
            ]
        ),
    ),
    "minimax-m2": wrapped("<minimax:tool_call>\n", "\n</minimax:tool_call>", invoke("", False)),
    "seed_oss": each("<seed:tool_call>\n", "\n</seed:tool_call>", _coder),
    "gemma": bares("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": bares("<|tool_call>", "<tool_call|>", '<|"|>'),
    "phi4": listed("functools", ""),
    "granite": listed("<|tool_call|>", ""),
    "interns1": each(
        "<|action_start|><|plugin|>\n",
        "<|action_end|>",
        lambda call: objects([call], arguments="parameters")[0],
    ),
    "hunyuan": listed("<tool_calls>", "</tool_calls>"),
    "jamba": listed("<tool_calls>\n", "\n</tool_calls>"),
    "lfm2": lambda calls: f"<|tool_call_start|>{python(calls)}<|tool_call_end|>",
    "cohere_command4": listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    "minimax-m3": wrapped(
        f"{M3}<tool_call>\n",
        f"\n{M3}</tool_call>",
        lambda call: f'{M3}<invoke name="{call[0]}">{nested(call[1])}{M3}</invoke>',
    ),
    "deepseekv41": wrapped(f"<{DSML} calls>\n", f"\n</{DSML} calls>", invoke(DSML + " ", True)),
    "gigachat35": wrapped("<｜GCML｜tool_calls>\n", "\n</｜GCML｜tool_calls>", invoke("｜GCML｜", True)),
    "gigachat3": each("<|function_call|>", "<|message_sep|>", one),
    "apertus2509": lambda calls: (
        "<|tools_prefix|>" + json.dumps([{name: values} for name, values in calls]) + "<|tools_suffix|>"
    ),
    "dots": wrapped("<dots_function_call>\n", "\n</dots_function_call>", invoke("", False)),
    "inkling": lambda calls: "".join(
        [
            f"<|message_model|>{call[0]}<|content_invoke_tool_json|>{objects([call], arguments='args')[0]}"
            "<|end_message|>"
            for call in calls
        ]
    ),
    "k2_horizon": wrapped("<ifm|tool_calls>\n", "\n</ifm|tool_calls>", typed),
    "kimi_k3": wrapped("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _typed, ""),
    "iquest_q1": each("<iquest_tool_call>", "</iquest_tool_call>", _pairs),
    "longcat": each("<longcat_tool_call>", "</longcat_tool_call>", one),
    "olmo3": lambda calls: (
        "<function_calls>" + "\n".join([python([call])[1:-1] for call in calls]) + "</function_calls>"
    ),
    "ernie45": _hermes,
    "minicpm5": lambda calls: "\n".join(
        [
            tags('<function name="', '">', '<param name="', '">', "</param>", "</function>")(call)
            for call in calls
        ]
    ),
    "muse": lambda calls: "<|start|>assistant".join(
        [
            " "
            f"to={call[0]}<|message|><atem:function_calls>"
            f"\n{invoke('atem:', False)(call)}\n</atem:function_calls><|eom|>"
            for call in calls
        ]
    ),
    "gpt-oss": lambda calls: "<|start|>assistant".join(
        [""]
        + [
            f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{plain(call)}<|call|>"
            for call in calls
        ]
    ),
}
assert WRITERS.keys() == {*TOOL_CALL_FORMATS, *CHANNEL_FORMATS}


def render(name: str, calls: Sequence[Call]) -> str:
    return WRITERS[name](calls)
