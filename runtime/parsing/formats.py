"""The formats in which models call tools. A new model needs a row here, and nothing else unless its calls are a new kind of item."""

from runtime.parsing.answer import Format, Section, Thinking
from runtime.parsing.items import Json, Named, Tagged
from runtime.parsing.literals import Bare, Pythonic

_HERMES = Format(models="Qwen2.5, Qwen3, QwQ, Hermes 2 and 3, pocket", items=(Json(),), sections=(Section("<tool_call>", "</tool_call>"),),
                 frame=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"))
_QWEN_XML = Tagged(begin="<function=", name_end=">", key="<parameter=", key_end=">", value_end="</parameter>", ends=("</function>",),
                   is_trimmed=True)
_QWEN_CODER = Format(models="Qwen3-Coder, Qwen3-Next-Coder, Qwen3.5, Step-3.5, MiMo, Nemotron 3", items=(_QWEN_XML,),
                     sections=(Section("<tool_call>", "</tool_call>"),), loose=("<function=",))
_GLM = Format(models="GLM-4.5, GLM-4.6, GLM-4.7, GLM-5", loose=("<tool_call>",), items=(
    Tagged(begin="<tool_call>", name_end="", key="<arg_key>", key_end="</arg_key>", before_value="<arg_value>", value_end="</arg_value>",
           ends=("</tool_call>",)),))
_DEEPSEEK = Section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DSML = "｜DSML｜"
_PYTHONIC = Format(models="Llama 4, Llama 3.2 1B and 3B, ToolACE", items=(Pythonic(),), at_start=("[",),
                   sections=(Section("<|python_start|>", "<|python_end|>"),))


def _dsml(mark: str, outer: str) -> tuple[Section, Tagged]:
    return Section(f"<{mark}{outer}>", f"</{mark}{outer}>"), Tagged(
        begin=f'<{mark}invoke name="', name_end='">', key=f'<{mark}parameter name="', key_end='">', value_end=f"</{mark}parameter>",
        ends=(f"</{mark}invoke>",), tells_strings=True, takes_json=True)


def _dsml_format(outer: str, models: str) -> Format:
    marked, plain = _dsml(_DSML, outer), _dsml("", outer)
    return Format(models=models, sections=(marked[0], plain[0]), items=(marked[1], plain[1]))


FORMATS: dict[str, Format] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "trinity": _HERMES,
    "qwen3_coder": _QWEN_CODER,
    "step3p5": _QWEN_CODER,
    "mimo": _QWEN_CODER,
    "llama3": Format(models="Llama 3.1, 3.2, 3.3", items=(Json(begins=("{",)),), sections=(Section("<|python_tag|>"),),
                     at_start=("{",)),
    "pythonic": _PYTHONIC,
    "mistral": Format(models="Mistral, Ministral, Magistral, Devstral", id_chars=9, sections=(Section("[TOOL_CALLS]"),), items=(
        Json(), Named(begin="", then=("[ARGS]", "{"), id_then="[CALL_ID]"))),
    "deepseekv3": Format(
        models="DeepSeek-V3, V3-0324, R1, R1-0528", sections=(_DEEPSEEK,), loose=("<｜tool▁call▁begin｜>",), items=(
            Named(begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", then=("```json",), ends=("```", "<｜tool▁call▁end｜>")),)),
    "deepseekv31": Format(
        models="DeepSeek-V3.1, V3.1-Terminus", sections=(_DEEPSEEK,), loose=("<｜tool▁call▁begin｜>",), items=(
            Named(begin="<｜tool▁call▁begin｜>", then=("<｜tool▁sep｜>",), ends=("<｜tool▁call▁end｜>",)),)),
    "deepseekv32": _dsml_format("function_calls", "DeepSeek-V3.2"),
    "deepseekv4": _dsml_format("tool_calls", "DeepSeek-V4"),
    "kimi_k2": Format(
        models="Kimi-K2, Kimi-K2-Thinking, Kimi-K2.5", loose=("<|tool_call_begin|>",),
        sections=(Section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),), items=(
            Named(begin="<|tool_call_begin|>", then=("<|tool_call_argument_begin|>",), ends=("<|tool_call_end|>",), has_call_ids=True),)),
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _GLM,
    "step3": Format(
        models="Step3", sections=(Section("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),),
        loose=("<｜tool_call_begin｜>",), items=(
            Tagged(begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', name_end='">',
                   key='<steptml:parameter name="', key_end='">', value_end="</steptml:parameter>",
                   ends=("</steptml:invoke>", "<｜tool_call_end｜>")),)),
    "minimax-m2": Format(
        models="MiniMax-M2, M2.1, M2.5", sections=(Section("<minimax:tool_call>", "</minimax:tool_call>"),), items=(
            Tagged(begin='<invoke name="', name_end='">', key='<parameter name="', key_end='">', value_end="</parameter>",
                   ends=("</invoke>",)),)),
    "seed_oss": Format(models="Seed-OSS", sections=(Section("<seed:tool_call>", "</seed:tool_call>"),),
                       items=(_QWEN_XML,)),
    "gemma": Format(
        models="FunctionGemma", items=(Bare(quote="<escape>"),),
        sections=(Section("<start_function_call>", "<end_function_call>"),)),
    "gemma4": Format(models="Gemma 4", sections=(Section("<|tool_call>", "<tool_call|>"),), items=(Bare(quote='<|"|>'),)),
    "phi4": Format(models="Phi-4-mini", items=(Json(begins=("[",)),),
                   sections=(Section("functools"), Section("<|tool_call|>", "<|/tool_call|>"))),
    "granite": Format(models="Granite 3.0 to 4.0", items=(Json(),),
                      sections=(Section("<|tool_call|>"), Section("<tool_call>", "</tool_call>"))),
    "interns1": Format(models="Intern-S1, InternLM2", items=(Json(),),
                       sections=(Section("<|action_start|><|plugin|>", "<|action_end|>"),
                                 Section("<|action_start|> <|plugin|>", "<|action_end|>"))),
    "hunyuan": Format(models="Hunyuan-A13B", items=(Json(),), sections=(Section("<tool_calls>", "</tool_calls>"),)),
    "jamba": Format(models="Jamba 1.5 and 1.6", items=(Json(),), sections=(Section("<tool_calls>", "</tool_calls>"),)),
    "lfm2": Format(models="LFM2", items=(Pythonic(), Json(begins=("{",))),
                   sections=(Section("<|tool_call_start|>", "<|tool_call_end|>"),)),
    "cohere_command4": Format(models="Command A, Command R7B", items=(Json(names=("tool_name",)),),
                              sections=(Section("<|START_ACTION|>", "<|END_ACTION|>"),)),
}

_PLAIN = Thinking(models="DeepSeek-V3.1 and later, and others that think where they or their template write <think>")
_QWEN = Thinking(models="Qwen3, Intern-S1, MiMo", also_ends=("<tool_call>",))
_FORCED = Thinking(models="DeepSeek-R1, R1-0528, Step3, Qwen3-Thinking, QwQ", is_forced=True)

THINKING: dict[str, Thinking] = {
    "cohere_command4": Thinking(models="Command A Reasoning", begin="<|START_THINKING|>", end="<|END_THINKING|>",
                                also_ends=("<|START_ACTION|>",)),
    "seed_oss": Thinking(models="Seed-OSS", begin="<seed:think>", end="</seed:think>", also_ends=("<seed:tool_call>",)),
    "deepseek-r1": _FORCED,
    "deepseek-v3": _PLAIN,
    "deepseek-v4": _PLAIN,
    "qwen3": _QWEN,
    "qwen3-thinking": Thinking(models="Qwen3-Thinking-2507", is_forced=True, also_ends=("<tool_call>",)),
    "interns1": _QWEN,
    "mimo": _QWEN,
    "glm45": Thinking(models="GLM-4.5 and later", also_ends=("<tool_call>",)),
    "nemotron_3": _QWEN,
    "kimi": Thinking(models="Kimi-VL-Thinking, Kimi-Dev", begin="◁think▷", end="◁/think▷"),
    "kimi_k2": Thinking(models="Kimi-K2-Thinking, Kimi-K2.5", also_ends=("<|tool_calls_section_begin|>",)),
    "minimax": _FORCED,
    "minimax-append-think": Thinking(models="MiniMax-M2, thinking left in the content", is_forced=True, is_kept=True),
    "step3": _FORCED,
    "step3p5": _FORCED,
    "mistral": Thinking(models="Magistral", begin="[THINK]", end="[/THINK]"),
    "gemma4": Thinking(models="Gemma 4", begin="<|channel>thought\n", end="<channel|>"),
}
