"""Checkpoints of models that take images or sound too, served as the text models that they contain.
Torch-free.

config.json of such a wrapper has the text model's part under `text_config`, or beside the other parts in
older files. `text_part` gives it as the text model's own config.json would say it. Weights of the other parts
(OTHER_WEIGHTS) are not loaded.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict, JsonValue
from runtime.models.config.config_files import decode
from runtime.models.config.renames import Renames

# fields of the whole file that hold for the text model, where its own part does not say
SHARED = ("bos_token_id", "compression_config", "dtype", "eos_token_id", "quantization_config", "torch_dtype")
# weights of other parts, by the names that wrappers have for them
OTHER_WEIGHTS = (
    r"^(thinker\.)?(model\.)?(visual|mlp1|vision_tower|vision_model|vision_encoder|audio_tower"
    r"|embed_vision|embed_audio|vit_large_projector|vision_language_adapter|pre_mm_projector_norm"
    r"|multi_modal_projector|mm_projector|vision_projection|patch_merger|image_newline|connector"
    r"|aligner|merger|sam_model|high_res_vision_\w+|qwen2_model|projector|view_sep[ae]rator)(\.|$)",
    r"^(talker|token2wav|code2wav)\.",
)
# what published files leave out of text_config, because it is the default of transformers
LLAMA: Fields = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
MISTRAL = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
QWEN2: Fields = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
GEMMA3: Fields = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
GEMMA3N: Fields = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
GEMMA4: Fields = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
INTERLEAVED: Fields = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
INTERLEAVED_35: Fields = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
GLM_SECTIONS: Fields = {"mrope_section": [8, 12, 12]}
OMNI_SECTIONS: Fields = {"mrope_section": [16, 24, 24]}
QWEN2_OMNI: Fields = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
}
QWEN3_OMNI: Fields = {"rope_theta": 1000000.0, "norm_topk_prob": True}
# part of config.json that is that of a wrapper, where the model speaks, too
THINKER = "thinker_config"


class TextModel(Struct, frozen=True):
    """The text model that a `model_type` of text_config stands for."""

    architecture: str
    defaults: Fields = {}
    rope: Fields = {}  # parameters of rotary positions that config.json may leave out


# model_type of text_config -> the text model
TEXT_MODELS = {
    "cohere2": TextModel("Cohere2ForCausalLM"),
    "deepseek_ocr2_text": TextModel("DeepseekOcr2TextForCausalLM"),
    "deepseek_v3": TextModel("DeepseekV3ForCausalLM"),
    "gemma3_text": TextModel("Gemma3ForCausalLM", GEMMA3),
    "gemma3n_text": TextModel("Gemma3nForCausalLM", GEMMA3N),
    "gemma4_text": TextModel("Gemma4ForCausalLM", GEMMA4),
    "gemma4_unified_text": TextModel("Gemma4UnifiedForCausalLM", GEMMA4),
    "glm4v_moe_text": TextModel("Glm4MoeForCausalLM", {"attention_bias": True}, GLM_SECTIONS),
    "glm4v_text": TextModel("Glm4ForCausalLM", {"partial_rotary_factor": 0.5}, GLM_SECTIONS),
    "gpt_oss": TextModel("GptOssForCausalLM"),
    "kimi_k2": TextModel("DeepseekV3ForCausalLM"),
    "llama": TextModel("LlamaForCausalLM", LLAMA),
    "llama4_text": TextModel("Llama4ForCausalLM"),
    "ministral3": TextModel("Ministral3ForCausalLM"),
    "mistral4": TextModel("Mistral4ForCausalLM"),
    "mistral": TextModel("MistralForCausalLM", MISTRAL),
    "qwen2": TextModel("Qwen2ForCausalLM", QWEN2),
    "qwen2_5_omni_text": TextModel("Qwen2ForCausalLM", QWEN2_OMNI, OMNI_SECTIONS),
    "qwen2_5_vl_text": TextModel("Qwen2ForCausalLM"),
    "qwen2_vl_text": TextModel("Qwen2ForCausalLM"),
    "qwen3": TextModel("Qwen3ForCausalLM"),
    "qwen3_5_moe_text": TextModel("Qwen3_5MoeForCausalLM", rope=INTERLEAVED_35),
    "qwen3_5_text": TextModel("Qwen3_5ForCausalLM", rope=INTERLEAVED_35),
    "qwen3_moe": TextModel("Qwen3MoeForCausalLM"),
    "qwen3_omni_moe_text": TextModel("Qwen3MoeForCausalLM", QWEN3_OMNI, INTERLEAVED),
    "qwen3_vl_moe_text": TextModel("Qwen3VLMoeTextForCausalLM", rope=INTERLEAVED),
    "qwen3_vl_text": TextModel("Qwen3ForCausalLM", rope=INTERLEAVED),
    "step3p5": TextModel("Step3p5ForCausalLM"),
}
# architecture -> model_type of its text model, where config.json does not say
WRAPPERS = {
    "AyaVisionForConditionalGeneration": "cohere2",
    "Cohere2VisionForConditionalGeneration": "cohere2",
    "DeepseekOcr2ForConditionalGeneration": "deepseek_ocr2_text",
    "DeepseekVLForConditionalGeneration": "llama",
    "DeepseekVLHybridForConditionalGeneration": "llama",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma3nForConditionalGeneration": "gemma3n_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Glm4vForConditionalGeneration": "glm4v_text",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLChatModel": "qwen2",
    "InternVLForConditionalGeneration": "qwen2",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "KimiVLForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "Llama4ForConditionalGeneration": "llama4_text",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "MiniCPMV4_6ForConditionalGeneration": "qwen3_5_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2AudioForConditionalGeneration": "qwen2",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen2_5OmniForConditionalGeneration": "qwen2_5_omni_text",
    "Qwen2_5OmniModel": "qwen2_5_omni_text",
    "Qwen2_5OmniThinkerForConditionalGeneration": "qwen2_5_omni_text",
    "Qwen3OmniMoeForConditionalGeneration": "qwen3_omni_moe_text",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "qwen3_omni_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "SmolVLMForConditionalGeneration": "llama",
    "Step3p7ForConditionalGeneration": "step3p5",
}
# architecture -> names of its text model's weights, and ours
TEXT_NAMES: dict[str, Renames] = {
    "Idefics3ForConditionalGeneration": (("text_model.", ""),),
    "Kimi_K25ForConditionalGeneration": (("blocks.", "layers."),),  # transformers 5.24 writes these names
    "SmolVLMForConditionalGeneration": (("text_model.", ""),),
}


def text_part(architecture: str, fields: Fields) -> Fields:
    """config.json of the text model in a wrapper. Raises ModelError for parts that are no objects, and for a
    text model without a row here."""
    if isinstance(thinker := fields.get(THINKER), dict):
        fields = {name: fields[name] for name in SHARED if name in fields} | thinker
    text = fields.get("text_config", fields.get("llm_config"))
    if text is None:
        text = fields  # older files have one level
    if not isinstance(text, dict):
        raise ModelError(
            "config.json: text_config must be an object; restore the file from the model's source"
        )
    kind = text.get("model_type") if text is not fields else None
    kind = WRAPPERS[architecture] if kind is None else kind
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        raise ModelError(
            f"config.json: text_config.model_type {kind} of {architecture} is not supported; supported are "
            f"{', '.join(sorted(TEXT_MODELS))}"
        )
    model = TEXT_MODELS[kind]
    found = model.defaults | text
    found |= {name: fields[name] for name in SHARED if found.get(name) is None and name in fields}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := found.get(name), dict):
            found[name] = model.rope | _of_text(rope)
    tied = [
        one["tie_word_embeddings"] for one in (fields, text) if one.get("tie_word_embeddings") is not None
    ]
    if tied:
        found["tie_word_embeddings"] = any(tied)
    return found | {"architectures": [model.architecture]}


def _of_text(rope: Fields) -> Fields:
    """Rotary positions of text alone: where a token has three positions, those of text are equal."""
    kinds = {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
    return rope | kinds


def wrapper_of(architecture: str, model_impl: str) -> str:
    """The architecture, where a checkpoint's text model is computed apart from the rest; else ""."""
    return architecture if architecture in WRAPPERS and model_impl != "transformers" else ""


def text_model(wrapper: str, raw: bytes, overrides: Mapping[str, JsonValue]) -> tuple[str, bytes]:
    """Architecture and config.json of the text model in a wrapper. Raises ModelError."""
    text = text_part(wrapper, decode(raw, JsonDict, "config.json"))
    names = text["architectures"]
    return names[0], msgspec.json.encode(text | dict(overrides) | {"architectures": names})
