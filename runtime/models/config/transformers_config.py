"""config.json of models that transformers' own code computes, read by the generic names of its fields.
Torch-free: transformers itself is not imported.

Families name the same number differently (hidden_size, n_embd, d_model). `read_generic` gives the fields the
names that model_config.py reads, and refuses what no paged attention of transformers can serve: states of
recurrent layers, cross-attention, chunks of attention, and positions that depend on the longest text of a
step.
"""

from functools import cache
from typing import Literal

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict, JsonValue
from runtime.models.config.config_files import decode
from runtime.models.config.transformers_media import UNSERVED_MEDIA, text_fields
from runtime.models.config.transformers_source import named_in

ModelImpl = Literal["auto", "runtime", "transformers"]

# our name of a number -> the names that families have for it, in the order in which they are looked for
NAMES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size", "n_vocab", "padded_vocab_size"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
        "decoder_attention_heads",
    ),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
    ),
}
# as NAMES, for numbers that follow from others where they are missing
OPTIONAL_NAMES: dict[str, tuple[str, ...]] = {
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_query_groups"),
    "head_dim": ("head_dim", "attention_head_size", "kv_channels"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "mlp_hidden_size"),
}
# fields that keep their names
KEPT = (
    "architectures",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "sliding_window",
    "layer_types",
)
STATES = "it keeps states of texts"
DRAFTS = "it drafts for Gemma 4, whose keys and values it reads"
MEDIA = "layers of its own take images or sounds"
# classes that generate and cannot be served over pages, where config.json does not say why
UNSERVED = {
    "BltForCausalLM": "it groups bytes to patches, to which layers cross-attend",
    "CpmAntForCausalLM": "its attention adds biases of position to scores",
    "FuyuForCausalLM": MEDIA,
    "Gemma4AssistantForCausalLM": DRAFTS,
    "Gemma4UnifiedAssistantForCausalLM": DRAFTS,
    "GitForCausalLM": MEDIA,
    "GotOcr2ForConditionalGeneration": MEDIA,
    "MllamaForCausalLM": MEDIA,
    "MoshiForCausalLM": MEDIA,
    "MossTranscribeDiarizeForConditionalGeneration": MEDIA,
    "MusicgenForCausalLM": MEDIA,
    "MusicgenMelodyForCausalLM": MEDIA,
    "RecurrentGemmaForCausalLM": STATES,
    "RwkvForCausalLM": STATES,
    "TrOCRForCausalLM": "it cross-attends to what an encoder makes of images",
    "XLMWithLMHeadModel": "its attention sees whole texts",
    "XLNetLMHeadModel": "its attention sees permutations of whole texts",
    "XmodForCausalLM": "it has adapters of languages, of which each text needs one",
    "ZambaForCausalLM": STATES,
    "xLSTMForCausalLM": STATES,
}
# types of rotary positions whose frequencies depend on the longest text of a step
BATCH_ROPES = ("dynamic", "longrope", "su")
LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
# what differs between two checkpoints of one model
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_commit_hash")


@cache
def generating_architectures() -> frozenset[str]:
    """Classes of the installed transformers that generate text, read from the source of its table. Raises
    ModelError where it is not installed."""
    return named_in("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


@cache
def media_architectures() -> frozenset[str]:
    """Classes of the installed transformers that generate text of images or sounds, too, as
    `generating_architectures`. Raises ModelError where it is not installed."""
    return named_in("MODEL_FOR_(?:IMAGE_TEXT_TO_TEXT|MULTIMODAL_LM)_MAPPING_NAMES")


def uses_transformers(architecture: str, impl: str, served: frozenset[str]) -> bool:
    """Whether transformers' code computes an architecture under --model-impl `impl`. `served`: architectures
    that this runtime has itself. Raises ModelError for one that transformers is to compute and cannot."""
    if impl == "runtime" or (impl == "auto" and architecture in served):
        return False
    if architecture in generating_architectures() or architecture in media_architectures():
        return True
    if impl == "auto":
        return False
    raise ModelError(
        f"--model-impl transformers: {architecture} is no class of the installed transformers that generates "
        "text, and code of a checkpoint is never run; leave the option out"
    )


def transformers_fields(architecture: str, raw: bytes, impl: str, served: frozenset[str]) -> JsonDict | None:
    """config.json of a model that transformers' code computes; None: our own code does. See
    uses_transformers. Raises ModelError."""
    if not uses_transformers(architecture, impl, served):
        return None
    if why := UNSERVED.get(architecture) or UNSERVED_MEDIA.get(architecture):
        raise ModelError(f"--model-impl transformers does not serve {architecture}: {why}")
    return decode(raw, JsonDict, "config.json")


def has_media(architecture: str, fields: JsonDict) -> bool:
    """Whether a class of transformers has a text model beside towers of images or sounds. Raises ModelError
    as `generating_architectures`."""
    return architecture in media_architectures() and (
        isinstance(fields.get("text_config"), dict) or architecture not in generating_architectures()
    )


def of_text(architecture: str, fields: JsonDict) -> JsonDict:
    """config.json of the text model, by the names that model_config.py reads. Raises ModelError."""
    return read_generic(text_fields(fields) if has_media(architecture, fields) else fields)


def check_generates(architecture: str, *, is_embedding: bool) -> None:
    """Raises ModelError where a model of transformers is to embed."""
    if is_embedding:
        raise ModelError(
            f"--is-embedding: transformers' code computes {architecture}, which serves models that generate; "
            "leave it out"
        )


def identity(fields: JsonDict) -> JsonDict:
    """The fields of config.json that say which model it is."""
    return {name: value for name, value in fields.items() if name not in VOLATILE}


def read_generic(fields: JsonDict) -> JsonDict:
    """The fields of config.json by the names that model_config.py reads. Raises ModelError, naming the field
    that is missing, or that says what is not supported."""
    _check_kind(fields)
    found: Fields = {name: fields[name] for name in KEPT if fields.get(name) is not None}
    for name, others in NAMES.items():
        value = _first(fields, others)
        if value is None:
            raise ModelError(
                f"config.json has none of {', '.join(others)}, which transformers' models need here; add "
                f"{others[0]} as the model's documentation says"
            )
        found[name] = value
    for name, others in OPTIONAL_NAMES.items():
        value = _first(fields, others)
        if value is not None:
            found[name] = value
    hidden = found["hidden_size"]
    if "intermediate_size" not in found and isinstance(hidden, int):
        found["intermediate_size"] = 4 * hidden
    latent = [fields.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    sizes = [size for size in latent if isinstance(size, int)]
    if len(sizes) == len(latent):  # keys and values of all heads are made of the latents
        found |= {"head_dim": sum(sizes), "num_key_value_heads": found["num_attention_heads"]}
    if fields.get("multi_query") is True and fields.get("new_decoder_architecture") is not True:
        found["num_key_value_heads"] = 1
    found.setdefault("tie_word_embeddings", True)
    found["layer_types"] = _layer_types(fields, found)
    return found


def _first(fields: JsonDict, names: tuple[str, ...]) -> JsonValue:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _check_kind(fields: JsonDict) -> None:
    """Raises ModelError for a model that paged attention alone cannot serve."""
    reasons = {
        "is_encoder_decoder": "it has an encoder",
        "add_cross_attention": "it has cross-attention",
        "attention_chunk_size": "its attention is in chunks",
        "alibi": "its attention adds biases of distance to scores",
        "quantization_config": "its weights are quantised",
    }
    for field, reason in reasons.items():
        if fields.get(field):
            raise ModelError(
                f"config.json: {field}: {reason}, which --model-impl transformers does not serve"
            )
    types = fields.get("layer_types")
    other = [kind for kind in types if kind not in LAYER_TYPES] if isinstance(types, list) else []
    if other:
        raise ModelError(
            f"config.json: layer_types has {other[0]}, and --model-impl transformers serves "
            "full_attention and sliding_attention"
        )
    ropes = [fields.get("rope_scaling"), fields.get("rope_parameters")]
    for rope in [one for one in ropes if isinstance(one, dict)]:
        kinds = {str(one.get("rope_type") or one.get("type")) for one in (rope, *_nested(rope))}
        if wrong := kinds & set(BATCH_ROPES):
            raise ModelError(
                f"config.json: rope type {min(wrong)} turns all texts of a step by the longest of them in "
                "transformers' code, so answers would depend on company; --model-impl transformers does not "
                "serve it"
            )


def _nested(rope: Fields) -> list[Fields]:
    return [value for value in rope.values() if isinstance(value, dict)]


def _layer_types(fields: JsonDict, found: Fields) -> list[JsonValue]:
    """Which layers have the sliding window: layer_types, or all layers of a model that has a window."""
    types, count = fields.get("layer_types"), found["num_hidden_layers"]
    assert isinstance(count, int) or not isinstance(types, list)
    has_window = bool(fields.get("sliding_window")) and fields.get("use_sliding_window") is not False
    if not isinstance(types, list):
        num_layers = count if isinstance(count, int) else 0
        return ["sliding_attention" if has_window else "full_attention"] * num_layers
    return [
        "sliding_attention" if one == "sliding_attention" and has_window else "full_attention"
        for one in types
    ]
