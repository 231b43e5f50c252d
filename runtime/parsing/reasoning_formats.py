"""The formats in which models write their reasoning. A new model needs a row here.

Sources: the models' chat templates and the parsers of SGLang (srt/parser, 0.5.23) and vLLM.
"""

from runtime.parsing.answer_parser import ReasoningFormat
from runtime.parsing.tool_call_formats import ERNIE_MARKERS, INKLING_MARKERS, K3_MARKERS, M3_PREFIX

_PLAIN = ReasoningFormat(
    models="DeepSeek-V3.1 and later, and others that think where they or their template write <think>"
)
_QWEN = ReasoningFormat(models="Qwen3, Intern-S1, MiMo", call_begins=("<tool_call>",))
_GLM = ReasoningFormat(models="GLM-4.5 and later", call_begins=("<tool_call>",))
_FORCED = ReasoningFormat(models="DeepSeek-R1, R1-0528, Step3, Qwen3-Thinking, QwQ", is_forced=True)

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "cohere_command4": ReasoningFormat(
        models="Command A Reasoning",
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        call_begins=("<|START_ACTION|>",),
    ),
    "seed_oss": ReasoningFormat(
        models="Seed-OSS", begin="<seed:think>", end="</seed:think>", call_begins=("<seed:tool_call>",)
    ),
    "deepseek-r1": _FORCED,
    "deepseek-v3": _PLAIN,
    "deepseek-v4": _PLAIN,
    "qwen3": _QWEN,
    "qwen3-thinking": ReasoningFormat(
        models="Qwen3-Thinking-2507", is_forced=True, call_begins=("<tool_call>",)
    ),
    "interns1": _QWEN,
    "mimo": _QWEN,
    "glm45": _GLM,
    "nemotron_3": _QWEN,
    "kimi": ReasoningFormat(models="Kimi-VL-Thinking, Kimi-Dev", begin="◁think▷", end="◁/think▷"),
    "kimi_k2": ReasoningFormat(
        models="Kimi-K2-Thinking, Kimi-K2.5", call_begins=("<|tool_calls_section_begin|>",)
    ),
    "minimax": _FORCED,
    "minimax-append-think": ReasoningFormat(
        models="MiniMax-M2, thinking left in the content", is_forced=True, stays_in_content=True
    ),
    "step3": _FORCED,
    "step3p5": _FORCED,
    "mistral": ReasoningFormat(models="Magistral", begin="[THINK]", end="[/THINK]"),
    "gemma4": ReasoningFormat(models="Gemma 4", begin="<|channel>thought\n", end="<channel|>"),
    "apertus2509": ReasoningFormat(
        models="Apertus",
        begin="<|inner_prefix|>",
        end="<|inner_suffix|>",
        call_begins=("<|tools_prefix|>",),
        resumes=True,
    ),
    "deepseek-v41": _PLAIN,
    "dots": _QWEN,
    "ernie45": ReasoningFormat(
        models="ERNIE 4.5", call_begins=("<tool_call>", "<response>"), dropped_markers=ERNIE_MARKERS
    ),
    "gigachat35": _FORCED,
    "granite_thinking_parser": ReasoningFormat(models="Granite 4.2", call_begins=("<tool_call>",)),
    "hunyuan": ReasoningFormat(
        models="Hunyuan-A13B, Hy3",
        alternatives=(("<think:opensource>", "</think:opensource>"),),
        call_begins=("<tool_calls>", "<tool_calls:opensource>"),
    ),
    "inkling": ReasoningFormat(
        models="Inkling",
        begin="<|message_model|><|content_thinking|>",
        end="<|end_message|>",
        alternatives=(("<|content_thinking|>", "<|end_message|>"),),
        dropped_markers=INKLING_MARKERS,
    ),
    "iquest_q1": ReasoningFormat(models="IQuest-Q1", call_begins=("<iquest_tool_call>",)),
    "k2_horizon": ReasoningFormat(
        models="K2 Horizon",
        begin="<ifm|think>",
        end="</ifm|think>",
        call_begins=("<ifm|tool_calls>", "<ifm|tool_call>"),
        alternatives=tuple([(f"<ifm|{name}>", f"</ifm|{name}>") for name in ("think_fast", "think_faster")]),
    ),
    "kimi_k3": ReasoningFormat(
        models="Kimi-K3",
        begin="<|open|>think<|sep|>",
        end="<|close|>think<|sep|>",
        dropped_markers=K3_MARKERS,
        call_begins=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
    ),
    "ling3": _GLM,
    # an answer without reasoning may begin with a lone end mark
    "minimax-m3": ReasoningFormat(
        models="MiniMax-M3",
        begin="<mm:think>",
        end="</mm:think>",
        call_begins=(M3_PREFIX + "<tool_call>",),
        dropped_markers=("</mm:think>",),
    ),
    "nanbeige": _QWEN,
    "poolside_v1": _GLM,
}
