"""The formats in which models call tools. A new model needs a row here, and nothing else unless its calls are
a new kind of item.

Where they come from: the models' chat templates and the parsers of SGLang (srt/function_call, srt/parser,
0.5.23) and vLLM.
"""

from runtime.parsing.answer import Format, Section, Thinking
from runtime.parsing.items import Json, Keyed, Named
from runtime.parsing.literals import Bare, Pythonic
from runtime.parsing.tags import Nested, Tagged

_HERMES = Format(
    models="Qwen2.5, Qwen3, QwQ, Hermes 2 and 3, pocket",
    items=(Json(),),
    sections=(Section("<tool_call>", "</tool_call>"),),
    frame=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
)


def _qwen_xml(section_end: str) -> Tagged:
    return Tagged(
        begin="<function=",
        name_end=">",
        key="<parameter=",
        key_end=">",
        value_end="</parameter>",
        ends=("</function>",),
        is_trimmed=True,
        unclosed=("\n</function>\n" + section_end,),
    )


_QWEN_CODER = Format(
    models="Qwen3-Coder, Qwen3-Next-Coder, Qwen3.5, Step-3.5, MiMo, Nemotron 3",
    items=(_qwen_xml("</tool_call>"),),
    sections=(Section("<tool_call>", "</tool_call>"),),
    loose=("<function=",),
)


def _pairs(begin: str, end: str, name_end: str = "", suffix: str = "") -> Tagged:
    """The way of GLM: pairs of keys and values; `suffix` ends the names of the tags."""
    return Tagged(
        begin=begin,
        name_end=name_end,
        key=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        ends=(end,),
        before_value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
    )


def _glm(models: str) -> Format:
    return Format(models=models, loose=("<tool_call>",), items=(_pairs("<tool_call>", "</tool_call>"),))


_GLM = _glm("GLM-4.5, GLM-4.6, GLM-4.7, GLM-5")
_DEEPSEEK = Section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_MARKS = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")  # some models leave out what begins them
_DSML = "｜DSML｜"
_PYTHONIC = Format(
    models="Llama 4, Llama 3.2 1B and 3B, ToolACE",
    items=(Pythonic(),),
    at_start=("[",),
    known=("[NAME(",),
    sections=(Section("<|python_start|>", "<|python_end|>"),),
)


def _dsml(mark: str, outer: str) -> tuple[Section, Tagged]:
    return Section(f"<{mark}{outer}>", f"</{mark}{outer}>"), Tagged(
        begin=f'<{mark}invoke name="',
        name_end='">',
        key=f'<{mark}parameter name="',
        key_end='">',
        value_end=f"</{mark}parameter>",
        ends=(f"</{mark}invoke>",),
        type_mark='" string="',
        takes_json=True,
    )


def _dsml_format(outer: str, models: str) -> Format:
    marked, plain = _dsml(_DSML, outer), _dsml("", outer)
    return Format(
        models=models, sections=(marked[0], plain[0]), items=(marked[1], plain[1]), loose=(marked[1].begin,)
    )


def _marked(mark: str, outer: str, models: str, drops: tuple[str, ...] = ()) -> Format:
    section, item = _dsml(mark, outer)
    return Format(models=models, sections=(section,), items=(item,), loose=(item.begin,), drops=drops)


def _invoke(mark: str = "", is_trimmed: bool = False) -> Tagged:
    return Tagged(
        begin=f'<{mark}invoke name="',
        name_end='">',
        key=f'<{mark}parameter name="',
        key_end='">',
        is_trimmed=is_trimmed,
        value_end=f"</{mark}parameter>",
        ends=(f"</{mark}invoke>",),
    )


def _hunyuan(suffix: str) -> tuple[Section, Tagged]:
    return Section(f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"), _pairs(
        f"<tool_call{suffix}>", f"</tool_call{suffix}>", f"<tool_sep{suffix}>", suffix
    )


def _ifm(models: str) -> Format:
    return Format(
        models=models,
        loose=("<ifm|tool_call>",),
        drops=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        items=(
            Tagged(
                begin="<ifm|tool_call>",
                name_end="",
                key="<ifm|arg_key>",
                key_end="</ifm|arg_key>",
                type_tags=("<ifm|arg_type>", "</ifm|arg_type>"),
                before_value="<ifm|arg_value>",
                value_end="</ifm|arg_value>",
                ends=("</ifm|tool_call>",),
                whole=Json(),
            ),
        ),
    )


_HY = (_hunyuan(""), _hunyuan(":opensource"))  # released tokenizers have the longer names
_K3_MARKS = (
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|close|>message<|sep|>",
    "<|end_of_msg|>",
)
_INKLING = "<|content_invoke_tool_json|>"
_INKLING_MARKS = (
    "<|message_model|><|content_text|>",
    "<|content_text|>",
    "<|end_message|>",
    "<|content_model_end_sampling|>",
)
_ERNIE_MARKS = ("<response>\n", "<response>", "\n</response>", "</response>")
_M3 = "]<]minimax[>["


FORMATS: dict[str, Format] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "trinity": _HERMES,
    "qwen3_coder": _QWEN_CODER,
    "step3p5": _QWEN_CODER,
    "mimo": _QWEN_CODER,
    "llama3": Format(
        models="Llama 3.1, 3.2, 3.3",
        items=(Json(begins=("{",)),),
        sections=(Section("<|python_tag|>"),),
        at_start=("{",),
    ),
    "pythonic": _PYTHONIC,
    "mistral": Format(
        models="Mistral, Ministral, Magistral, Devstral",
        id_chars=9,
        sections=(Section("[TOOL_CALLS]"),),
        items=(Json(), Named(begin="", then=("[ARGS]", "{"), id_then="[CALL_ID]")),
    ),
    "deepseekv3": Format(
        models="DeepSeek-V3, V3-0324, R1, R1-0528",
        drops=_DEEPSEEK_MARKS,
        sections=(_DEEPSEEK,),
        loose=("<｜tool▁call▁begin｜>",),
        items=(
            Named(
                begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                then=("```json",),
                ends=("```", "<｜tool▁call▁end｜>"),
            ),
        ),
    ),
    "deepseekv31": Format(
        models="DeepSeek-V3.1, V3.1-Terminus",
        drops=_DEEPSEEK_MARKS,
        sections=(_DEEPSEEK,),
        loose=("<｜tool▁call▁begin｜>",),
        items=(
            Named(begin="<｜tool▁call▁begin｜>", then=("<｜tool▁sep｜>",), ends=("<｜tool▁call▁end｜>",)),
        ),
    ),
    "deepseekv32": _dsml_format("function_calls", "DeepSeek-V3.2"),
    "deepseekv4": _dsml_format("tool_calls", "DeepSeek-V4"),
    "kimi_k2": Format(
        models="Kimi-K2, Kimi-K2-Thinking, Kimi-K2.5",
        loose=("<|tool_call_begin|>",),
        sections=(Section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        drops=("<|tool_calls_section_end|>", "<|tool_call_end|>"),
        items=(
            Named(
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
    "step3": Format(
        models="Step3",
        sections=(Section("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),),
        loose=("<｜tool_call_begin｜>",),
        items=(
            Tagged(
                begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
                name_end='">',
                key='<steptml:parameter name="',
                key_end='">',
                value_end="</steptml:parameter>",
                ends=("</steptml:invoke>", "<｜tool_call_end｜>"),
            ),
        ),
    ),
    "minimax-m2": Format(
        models="MiniMax-M2, M2.1, M2.5",
        sections=(Section("<minimax:tool_call>", "</minimax:tool_call>"),),
        items=(_invoke(),),
    ),
    "minimax-m3": Format(
        models="MiniMax-M3",
        sections=(Section(_M3 + "<tool_call>", _M3 + "</tool_call>"),),
        items=(Nested(_M3),),
    ),
    "seed_oss": Format(
        models="Seed-OSS",
        sections=(Section("<seed:tool_call>", "</seed:tool_call>"),),
        items=(_qwen_xml("</seed:tool_call>"),),
    ),
    "gemma": Format(
        models="FunctionGemma",
        items=(Bare(quote="<escape>"),),
        sections=(Section("<start_function_call>", "<end_function_call>"),),
    ),
    "gemma4": Format(
        models="Gemma 4",
        known=("call:NAME{",),
        items=(Bare(quote='<|"|>'),),
        sections=(Section("<|tool_call>", "<tool_call|>"), Section("<|tool_call>:", "<tool_call|>")),
    ),
    "phi4": Format(
        models="Phi-4-mini",
        items=(Json(begins=("[",)),),
        sections=(Section("functools"), Section("<|tool_call|>", "<|/tool_call|>")),
    ),
    "granite": Format(
        models="Granite 3.0 to 4.0",
        items=(Json(),),
        sections=(Section("<|tool_call|>"), Section("<tool_call>", "</tool_call>")),
    ),
    "interns1": Format(
        models="Intern-S1, InternLM2",
        items=(Json(),),
        sections=(
            Section("<|action_start|><|plugin|>", "<|action_end|>"),
            Section("<|action_start|> <|plugin|>", "<|action_end|>"),
        ),
    ),
    "hunyuan": Format(
        models="Hunyuan-A13B, Hy3",
        items=(Json(), *[item for _, item in _HY]),
        sections=tuple([section for section, _ in _HY]),
    ),
    "jamba": Format(
        models="Jamba 1.5 and 1.6", items=(Json(),), sections=(Section("<tool_calls>", "</tool_calls>"),)
    ),
    "lfm2": Format(
        models="LFM2",
        items=(Json(begins=("{", "[{")), Pythonic()),
        sections=(Section("<|tool_call_start|>", "<|tool_call_end|>"),),
    ),
    "cohere_command4": Format(
        models="Command A, Command R7B",
        items=(Json(names=("tool_name",)),),
        sections=(Section("<|START_ACTION|>", "<|END_ACTION|>"),),
    ),
    "deepseekv41": _marked(_DSML + " ", "calls", "DeepSeek-V4.1"),  # a space behind the mark of every tag
    "gigachat3": Format(
        models="GigaChat 3",
        items=(Json(),),
        drops=("<|message_sep|>",),
        sections=(Section("function call<|role_sep|>\n"), Section("<|function_call|>")),
    ),
    "gigachat35": _marked("｜GCML｜", "tool_calls", "GigaChat 3.5", drops=("<|message_sep|>",)),
    "apertus2509": Format(
        models="Apertus", items=(Keyed(),), sections=(Section("<|tools_prefix|>", "<|tools_suffix|>"),)
    ),
    "dots": Format(
        models="dots",
        items=(_invoke(is_trimmed=True), Json()),
        sections=(Section("<dots_function_call>", "</dots_function_call>"),),
    ),
    "inkling": Format(
        models="Inkling",
        drops=_INKLING_MARKS,
        loose=(_INKLING,),
        items=(Json(arguments=("args",), begins=("", _INKLING), lead=_INKLING),),
        sections=(Section("<|message_model|>", "<|end_message|>"),),
    ),
    "k2_horizon": _ifm("K2 Horizon"),
    "kimi_k3": Format(
        models="Kimi-K3",
        drops=_K3_MARKS,
        sections=(Section("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
        items=(
            Tagged(
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
    "iquest_q1": Format(
        models="IQuest-Q1",
        loose=("<iquest_tool_call>",),
        items=(_pairs("<iquest_tool_call>", "</iquest_tool_call>"),),
    ),
    "nanbeige": _QWEN_CODER,
    "longcat": Format(
        models="LongCat-Flash",
        items=(Json(),),
        sections=(Section("<longcat_tool_call>", "</longcat_tool_call>"),),
    ),
    "olmo3": Format(
        models="Olmo 3",
        items=(Pythonic(begins=("[", "")),),
        sections=(Section("<function_calls>", "</function_calls>"),),
    ),
    "ernie45": Format(
        models="ERNIE 4.5",
        items=(Json(),),
        sections=(Section("<tool_call>", "</tool_call>"),),
        drops=_ERNIE_MARKS,
    ),
    "minicpm5": Format(
        models="MiniCPM5",
        loose=('<function name="',),
        items=(
            Tagged(
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
ATEM = Format(
    items=(_invoke("atem:"),),
    sections=(Section("<atem:function_calls>", "</atem:function_calls>"),),
    loose=('<atem:invoke name="',),
)

_PLAIN = Thinking(
    models="DeepSeek-V3.1 and later, and others that think where they or their template write <think>"
)
_QWEN = Thinking(models="Qwen3, Intern-S1, MiMo", also_ends=("<tool_call>",))
_GLM_THINKING = Thinking(models="GLM-4.5 and later", also_ends=("<tool_call>",))
_FORCED = Thinking(models="DeepSeek-R1, R1-0528, Step3, Qwen3-Thinking, QwQ", is_forced=True)

THINKING: dict[str, Thinking] = {
    "cohere_command4": Thinking(
        models="Command A Reasoning",
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        also_ends=("<|START_ACTION|>",),
    ),
    "seed_oss": Thinking(
        models="Seed-OSS", begin="<seed:think>", end="</seed:think>", also_ends=("<seed:tool_call>",)
    ),
    "deepseek-r1": _FORCED,
    "deepseek-v3": _PLAIN,
    "deepseek-v4": _PLAIN,
    "qwen3": _QWEN,
    "qwen3-thinking": Thinking(models="Qwen3-Thinking-2507", is_forced=True, also_ends=("<tool_call>",)),
    "interns1": _QWEN,
    "mimo": _QWEN,
    "glm45": _GLM_THINKING,
    "nemotron_3": _QWEN,
    "kimi": Thinking(models="Kimi-VL-Thinking, Kimi-Dev", begin="◁think▷", end="◁/think▷"),
    "kimi_k2": Thinking(models="Kimi-K2-Thinking, Kimi-K2.5", also_ends=("<|tool_calls_section_begin|>",)),
    "minimax": _FORCED,
    "minimax-append-think": Thinking(
        models="MiniMax-M2, thinking left in the content", is_forced=True, is_kept=True
    ),
    "step3": _FORCED,
    "step3p5": _FORCED,
    "mistral": Thinking(models="Magistral", begin="[THINK]", end="[/THINK]"),
    "gemma4": Thinking(models="Gemma 4", begin="<|channel>thought\n", end="<channel|>"),
    "apertus2509": Thinking(
        models="Apertus",
        begin="<|inner_prefix|>",
        end="<|inner_suffix|>",
        also_ends=("<|tools_prefix|>",),
        goes_on=True,
    ),
    "deepseek-v41": _PLAIN,
    "dots": _QWEN,
    "ernie45": Thinking(models="ERNIE 4.5", also_ends=("<tool_call>", "<response>"), drops=_ERNIE_MARKS),
    "gigachat35": _FORCED,
    "granite_thinking_parser": Thinking(models="Granite 4.2", also_ends=("<tool_call>",)),
    "hunyuan": Thinking(
        models="Hunyuan-A13B, Hy3",
        also=(("<think:opensource>", "</think:opensource>"),),
        also_ends=("<tool_calls>", "<tool_calls:opensource>"),
    ),
    "inkling": Thinking(
        models="Inkling",
        begin="<|message_model|><|content_thinking|>",
        end="<|end_message|>",
        also=(("<|content_thinking|>", "<|end_message|>"),),
        drops=_INKLING_MARKS,
    ),
    "iquest_q1": Thinking(models="IQuest-Q1", also_ends=("<iquest_tool_call>",)),
    "k2_horizon": Thinking(
        models="K2 Horizon",
        begin="<ifm|think>",
        end="</ifm|think>",
        also_ends=("<ifm|tool_calls>", "<ifm|tool_call>"),
        also=tuple([(f"<ifm|{name}>", f"</ifm|{name}>") for name in ("think_fast", "think_faster")]),
    ),
    "kimi_k3": Thinking(
        models="Kimi-K3",
        begin="<|open|>think<|sep|>",
        end="<|close|>think<|sep|>",
        drops=_K3_MARKS,
        also_ends=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
    ),
    "ling3": _GLM_THINKING,
    # an answer without thoughts may begin with a lone end mark
    "minimax-m3": Thinking(
        models="MiniMax-M3",
        begin="<mm:think>",
        end="</mm:think>",
        also_ends=(_M3 + "<tool_call>",),
        drops=("</mm:think>",),
    ),
    "nanbeige": _QWEN,
    "poolside_v1": _GLM_THINKING,
}
