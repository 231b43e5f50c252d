"""The formats in which models write tool calls. A new model needs a row here, and nothing else unless its
calls have a new syntax.

Sources: the models' chat templates and the parsers of SGLang (srt/function_call, srt/parser, 0.5.23) and
vLLM.
"""

from runtime.parsing.answer_parser import Section, ToolCallFormat
from runtime.parsing.call_syntax import JsonCalls, KeyedJsonCalls, NamedJsonCalls
from runtime.parsing.literal_syntax import BareCalls, PythonicCalls
from runtime.parsing.xml_syntax import NestedXmlCalls, XmlCalls

_HERMES = ToolCallFormat(
    models="Qwen2.5, Qwen3, QwQ, Hermes 2 and 3, pocket",
    syntaxes=(JsonCalls(),),
    sections=(Section("<tool_call>", "</tool_call>"),),
)


def _qwen_xml(section_end: str) -> XmlCalls:
    return XmlCalls(
        begin="<function=",
        name_end=">",
        key="<parameter=",
        key_end=">",
        value_end="</parameter>",
        ends=("</function>",),
        is_trimmed=True,
        unclosed=("\n</function>\n" + section_end,),
    )


_QWEN_CODER = ToolCallFormat(
    models="Qwen3-Coder, Qwen3-Next-Coder, Qwen3.5, Step-3.5, MiMo, Nemotron 3",
    syntaxes=(_qwen_xml("</tool_call>"),),
    sections=(Section("<tool_call>", "</tool_call>"),),
    anywhere=("<function=",),
)


def _pairs(begin: str, end: str, name_end: str = "", suffix: str = "") -> XmlCalls:
    """GLM's way: pairs of keys and values; `suffix` ends the names of the tags."""
    return XmlCalls(
        begin=begin,
        name_end=name_end,
        key=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        ends=(end,),
        before_value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
    )


def _glm(models: str) -> ToolCallFormat:
    return ToolCallFormat(
        models=models, anywhere=("<tool_call>",), syntaxes=(_pairs("<tool_call>", "</tool_call>"),)
    )


_GLM = _glm("GLM-4.5, GLM-4.6, GLM-4.7, GLM-5")
_DEEPSEEK = Section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_ENDS = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")  # some models leave out what begins them
_DSML = "｜DSML｜"
_PYTHONIC = ToolCallFormat(
    models="Llama 4, Llama 3.2 1B and 3B, ToolACE",
    syntaxes=(PythonicCalls(),),
    at_start=("[",),
    known=("[NAME(",),
    sections=(Section("<|python_start|>", "<|python_end|>"),),
)


def _dsml(prefix: str, outer: str) -> tuple[Section, XmlCalls]:
    return Section(f"<{prefix}{outer}>", f"</{prefix}{outer}>"), XmlCalls(
        begin=f'<{prefix}invoke name="',
        name_end='">',
        key=f'<{prefix}parameter name="',
        key_end='">',
        value_end=f"</{prefix}parameter>",
        ends=(f"</{prefix}invoke>",),
        type_mark='" string="',
        takes_json=True,
    )


def _dsml_format(outer: str, models: str) -> ToolCallFormat:
    marked, plain = _dsml(_DSML, outer), _dsml("", outer)
    return ToolCallFormat(
        models=models,
        sections=(marked[0], plain[0]),
        syntaxes=(marked[1], plain[1]),
        anywhere=(marked[1].begin,),
    )


def _marked(prefix: str, outer: str, models: str, dropped_markers: tuple[str, ...] = ()) -> ToolCallFormat:
    section, item = _dsml(prefix, outer)
    return ToolCallFormat(
        models=models,
        sections=(section,),
        syntaxes=(item,),
        anywhere=(item.begin,),
        dropped_markers=dropped_markers,
    )


def _invoke(prefix: str = "", is_trimmed: bool = False) -> XmlCalls:
    return XmlCalls(
        begin=f'<{prefix}invoke name="',
        name_end='">',
        key=f'<{prefix}parameter name="',
        key_end='">',
        is_trimmed=is_trimmed,
        value_end=f"</{prefix}parameter>",
        ends=(f"</{prefix}invoke>",),
    )


def _hunyuan(suffix: str) -> tuple[Section, XmlCalls]:
    return Section(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"), _pairs(
        f"<tool_call{suffix}>", f"</tool_call{suffix}>", f"<tool_sep{suffix}>", suffix
    )


def _ifm(models: str) -> ToolCallFormat:
    return ToolCallFormat(
        models=models,
        anywhere=("<ifm|tool_call>",),
        dropped_markers=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        syntaxes=(
            XmlCalls(
                begin="<ifm|tool_call>",
                name_end="",
                key="<ifm|arg_key>",
                key_end="</ifm|arg_key>",
                type_tags=("<ifm|arg_type>", "</ifm|arg_type>"),
                before_value="<ifm|arg_value>",
                value_end="</ifm|arg_value>",
                ends=("</ifm|tool_call>",),
                whole=JsonCalls(),
            ),
        ),
    )


_HY = (_hunyuan(""), _hunyuan(":opensource"))  # released tokenizers have the longer names
K3_MARKERS = (
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|close|>message<|sep|>",
    "<|end_of_msg|>",
)
_INKLING = "<|content_invoke_tool_json|>"
INKLING_MARKERS = (
    "<|message_model|><|content_text|>",
    "<|content_text|>",
    "<|end_message|>",
    "<|content_model_end_sampling|>",
)
ERNIE_MARKERS = ("<response>\n", "<response>", "\n</response>", "</response>")
M3_PREFIX = "]<]minimax[>["


TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "trinity": _HERMES,
    "qwen3_coder": _QWEN_CODER,
    "step3p5": _QWEN_CODER,
    "mimo": _QWEN_CODER,
    "llama3": ToolCallFormat(
        models="Llama 3.1, 3.2, 3.3",
        syntaxes=(JsonCalls(begins=("{",)),),
        sections=(Section("<|python_tag|>"),),
        at_start=("{",),
    ),
    "pythonic": _PYTHONIC,
    "mistral": ToolCallFormat(
        models="Mistral, Ministral, Magistral, Devstral",
        call_id_length=9,
        sections=(Section("[TOOL_CALLS]"),),
        syntaxes=(JsonCalls(), NamedJsonCalls(begin="", then=("[ARGS]", "{"), id_then="[CALL_ID]")),
    ),
    "deepseekv3": ToolCallFormat(
        models="DeepSeek-V3, V3-0324, R1, R1-0528",
        dropped_markers=_DEEPSEEK_ENDS,
        sections=(_DEEPSEEK,),
        anywhere=("<｜tool▁call▁begin｜>",),
        syntaxes=(
            NamedJsonCalls(
                begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                then=("```json",),
                ends=("```", "<｜tool▁call▁end｜>"),
            ),
        ),
    ),
    "deepseekv31": ToolCallFormat(
        models="DeepSeek-V3.1, V3.1-Terminus",
        dropped_markers=_DEEPSEEK_ENDS,
        sections=(_DEEPSEEK,),
        anywhere=("<｜tool▁call▁begin｜>",),
        syntaxes=(
            NamedJsonCalls(
                begin="<｜tool▁call▁begin｜>", then=("<｜tool▁sep｜>",), ends=("<｜tool▁call▁end｜>",)
            ),
        ),
    ),
    "deepseekv32": _dsml_format("function_calls", "DeepSeek-V3.2"),
    "deepseekv4": _dsml_format("tool_calls", "DeepSeek-V4"),
    "kimi_k2": ToolCallFormat(
        models="Kimi-K2, Kimi-K2-Thinking, Kimi-K2.5",
        anywhere=("<|tool_call_begin|>",),
        sections=(Section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        dropped_markers=("<|tool_calls_section_end|>", "<|tool_call_end|>"),
        syntaxes=(
            NamedJsonCalls(
                begin="<|tool_call_begin|>",
                then=("<|tool_call_argument_begin|>",),
                ends=("<|tool_call_end|>",),
                has_call_ids=True,
            ),
        ),
    ),
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _GLM,
    "step3": ToolCallFormat(
        models="Step3",
        sections=(Section("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),),
        anywhere=("<｜tool_call_begin｜>",),
        syntaxes=(
            XmlCalls(
                begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
                name_end='">',
                key='<steptml:parameter name="',
                key_end='">',
                value_end="</steptml:parameter>",
                ends=("</steptml:invoke>", "<｜tool_call_end｜>"),
            ),
        ),
    ),
    "minimax-m2": ToolCallFormat(
        models="MiniMax-M2, M2.1, M2.5",
        sections=(Section("<minimax:tool_call>", "</minimax:tool_call>"),),
        syntaxes=(_invoke(),),
    ),
    "minimax-m3": ToolCallFormat(
        models="MiniMax-M3",
        sections=(Section(M3_PREFIX + "<tool_call>", M3_PREFIX + "</tool_call>"),),
        syntaxes=(NestedXmlCalls(M3_PREFIX),),
    ),
    "seed_oss": ToolCallFormat(
        models="Seed-OSS",
        sections=(Section("<seed:tool_call>", "</seed:tool_call>"),),
        syntaxes=(_qwen_xml("</seed:tool_call>"),),
    ),
    "gemma": ToolCallFormat(
        models="FunctionGemma",
        syntaxes=(BareCalls(quote="<escape>"),),
        sections=(Section("<start_function_call>", "<end_function_call>"),),
    ),
    "gemma4": ToolCallFormat(
        models="Gemma 4",
        known=("call:NAME{",),
        syntaxes=(BareCalls(quote='<|"|>'),),
        sections=(Section("<|tool_call>", "<tool_call|>"), Section("<|tool_call>:", "<tool_call|>")),
    ),
    "phi4": ToolCallFormat(
        models="Phi-4-mini",
        syntaxes=(JsonCalls(begins=("[",)),),
        sections=(Section("functools"), Section("<|tool_call|>", "<|/tool_call|>")),
    ),
    "granite": ToolCallFormat(
        models="Granite 3.0 to 4.0",
        syntaxes=(JsonCalls(),),
        sections=(Section("<|tool_call|>"), Section("<tool_call>", "</tool_call>")),
    ),
    "interns1": ToolCallFormat(
        models="Intern-S1, InternLM2",
        syntaxes=(JsonCalls(),),
        sections=(
            Section("<|action_start|><|plugin|>", "<|action_end|>"),
            Section("<|action_start|> <|plugin|>", "<|action_end|>"),
        ),
    ),
    "hunyuan": ToolCallFormat(
        models="Hunyuan-A13B, Hy3",
        syntaxes=(JsonCalls(), *[item for _, item in _HY]),
        sections=tuple([section for section, _ in _HY]),
    ),
    "jamba": ToolCallFormat(
        models="Jamba 1.5 and 1.6",
        syntaxes=(JsonCalls(),),
        sections=(Section("<tool_calls>", "</tool_calls>"),),
    ),
    "lfm2": ToolCallFormat(
        models="LFM2",
        syntaxes=(JsonCalls(begins=("{", "[{")), PythonicCalls()),
        sections=(Section("<|tool_call_start|>", "<|tool_call_end|>"),),
    ),
    "cohere_command4": ToolCallFormat(
        models="Command A, Command R7B",
        syntaxes=(JsonCalls(names=("tool_name",)),),
        sections=(Section("<|START_ACTION|>", "<|END_ACTION|>"),),
    ),
    "deepseekv41": _marked(_DSML + " ", "calls", "DeepSeek-V4.1"),  # a space behind the mark of every tag
    "gigachat3": ToolCallFormat(
        models="GigaChat 3",
        syntaxes=(JsonCalls(),),
        dropped_markers=("<|message_sep|>",),
        sections=(Section("function call<|role_sep|>\n"), Section("<|function_call|>")),
    ),
    "gigachat35": _marked("｜GCML｜", "tool_calls", "GigaChat 3.5", dropped_markers=("<|message_sep|>",)),
    "apertus2509": ToolCallFormat(
        models="Apertus",
        syntaxes=(KeyedJsonCalls(),),
        sections=(Section("<|tools_prefix|>", "<|tools_suffix|>"),),
    ),
    "dots": ToolCallFormat(
        models="dots",
        syntaxes=(_invoke(is_trimmed=True), JsonCalls()),
        sections=(Section("<dots_function_call>", "</dots_function_call>"),),
    ),
    "inkling": ToolCallFormat(
        models="Inkling",
        dropped_markers=INKLING_MARKERS,
        anywhere=(_INKLING,),
        syntaxes=(JsonCalls(arguments=("args",), begins=("", _INKLING), lead=_INKLING),),
        sections=(Section("<|message_model|>", "<|end_message|>"),),
    ),
    "k2_horizon": _ifm("K2 Horizon"),
    "kimi_k3": ToolCallFormat(
        models="Kimi-K3",
        dropped_markers=K3_MARKERS,
        sections=(Section("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
        syntaxes=(
            XmlCalls(
                begin='<|open|>call tool="',
                name_end='"<|sep|>',
                key='<|open|>argument key="',
                key_end='"<|sep|>',
                type_mark='" type="',
                value_end="<|close|>argument<|sep|>",
                ends=("<|close|>call<|sep|>",),
                is_escaped=True,
            ),
        ),
    ),
    "ling3": _glm("Ling 3, Ring 2.6"),
    "poolside_v1": _glm("Laguna"),
    "spark25": _glm("Spark 2.5"),
    "iquest_q1": ToolCallFormat(
        models="IQuest-Q1",
        anywhere=("<iquest_tool_call>",),
        syntaxes=(_pairs("<iquest_tool_call>", "</iquest_tool_call>"),),
    ),
    "nanbeige": _QWEN_CODER,
    "longcat": ToolCallFormat(
        models="LongCat-Flash",
        syntaxes=(JsonCalls(),),
        sections=(Section("<longcat_tool_call>", "</longcat_tool_call>"),),
    ),
    "olmo3": ToolCallFormat(
        models="Olmo 3",
        syntaxes=(PythonicCalls(begins=("[", "")),),
        sections=(Section("<function_calls>", "</function_calls>"),),
    ),
    "ernie45": ToolCallFormat(
        models="ERNIE 4.5",
        syntaxes=(JsonCalls(),),
        sections=(Section("<tool_call>", "</tool_call>"),),
        dropped_markers=ERNIE_MARKERS,
    ),
    "minicpm5": ToolCallFormat(
        models="MiniCPM5",
        anywhere=('<function name="',),
        syntaxes=(
            XmlCalls(
                begin='<function name="',
                name_end='">',
                key='<param name="',
                key_end='">',
                value_end="</param>",
                ends=("</function>",),
                is_trimmed=True,
                takes_cdata=True,
            ),
        ),
    ),
}
# what messages to tools hold, in answers that are messages (actors/channels.py)
ATEM = ToolCallFormat(
    syntaxes=(_invoke("atem:"),),
    sections=(Section("<atem:function_calls>", "</atem:function_calls>"),),
    anywhere=('<atem:invoke name="',),
)
