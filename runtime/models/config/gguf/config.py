"""GGUF's metadata as config.json and generation_config.json have it."""

from collections import Counter
from pathlib import Path

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict
from runtime.models.config.gguf.container import Gguf, GgufTensor, Texts, is_gguf, read_gguf
from runtime.models.config.gguf.families import family_of
from runtime.models.config.gguf.metadata import Metadata
from runtime.models.config.gguf.tensors import sources
from runtime.models.config.gguf.types import CODED, PLAIN
from runtime.models.config.quantization_config import Quantization, read_quantization
from runtime.models.config.quantization_schemes import Ggml, WeightFormat

# config.json's name -> GGUF's, behind the architecture and a dot
SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
SCALING = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
FREQUENCIES = "rope_freqs.weight"  # divisors of rotary frequencies
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # which are one weight
# ids of tokens that end an answer, and texts of control tokens that do so by other names
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"}
)
CONTROL = 3  # of tokenizer.ggml.token_type


def config_fields(path: str | Path) -> tuple[Fields, Fields]:
    """What config.json and generation_config.json of the model would say. Raises ModelError."""
    gguf = read_gguf(path)
    family = family_of(gguf)
    read = Metadata(gguf, str(gguf.metadata["general.architecture"]))
    fields: Fields = family.fields | {"architectures": [family.architecture]}
    fields |= {name: read.needed(key) for name, key in SIZES.items()}
    optional = OPTIONAL | family.keys
    fields |= {name: value for name, key in optional.items() if (value := read.number(key)) is not None}
    if not family.is_latent and read.number("attention.value_length") not in (None, fields.get("head_dim")):
        raise ModelError(f"{gguf.paths[0].name}: heads of keys and values have different sizes here")
    fields |= _facts_of_tensors(gguf) | _rope(read, fields)
    if family.read is not None:
        fields |= family.read(read, fields)
    return fields, {"eos_token_id": list(end_ids(gguf))}


def end_ids(gguf: Gguf) -> tuple[int, ...]:
    """Ids of the tokens that end an answer, those that the file names first."""
    named = [gguf.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS]
    types = gguf.metadata.get("tokenizer.ggml.token_type")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    known = [one for one in named if isinstance(one, int)]
    if isinstance(types, tuple) and isinstance(tokens, Texts) and len(types) == tokens.count:
        special = {i for i, kind in enumerate(types) if kind == CONTROL}
        known += [i for i, text in enumerate(tokens.read()) if i in special and text in END_TEXTS]
    return tuple(dict.fromkeys(known))


def read_gguf_quantization(path: str | Path, requested: str | None) -> Quantization | None:
    """The types of the checkpoint's matrices, by module; None: none of them is coded. Raises ModelError for
    another quantization than requested."""
    formats: dict[str, WeightFormat | None] = {}
    gguf = read_gguf(path)
    is_paired = family_of(gguf).is_paired
    for source in sources(gguf):
        if source.form == "codes":
            formats[source.name.rpartition(".")[0]] = WeightFormat(Ggml((("", "MXFP4"),)), "gguf")
        if is_paired and source.name.removesuffix(".weight").endswith(ATTENTION):
            continue  # their rows are reordered when they are loaded
        is_matrix = len(source.shape) == 2 and source.name.endswith(".weight") and not source.form
        if is_matrix and source.tensor.type in CODED:
            scheme = Ggml((("", source.tensor.type),))
            formats[source.name.removesuffix(".weight")] = WeightFormat(scheme, "gguf")
    if requested not in (None, "gguf") and formats:
        raise ModelError(
            f"--quantization {requested}, but {Path(path).name} is quantised already; leave the flag out"
        )
    return Quantization(method="gguf", modules=formats) if formats else None


def read_any_quantization(path: Path, given: JsonDict | None, requested: str | None) -> Quantization | None:
    """The quantization of a checkpoint of any format, or that which is requested; see read_quantization.
    Raises ModelError."""
    if not is_gguf(path):
        return read_quantization(path, given, requested)
    found = read_gguf_quantization(path, requested)
    online = requested is not None and requested != "gguf"
    return read_quantization(path, None, requested) if found is None and online else found


def _facts_of_tensors(gguf: Gguf) -> Fields:
    """What follows from the tensors that there are: sizes, ties, biases, and the dtype to compute in."""
    tensors = gguf.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.paths[0].name} has no token_embd.weight; it is no whole model")
    ids = {
        f"{name}_token_id": gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")
    }
    return {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "dtype": _dtype(list(tensors.values())),
        **{name: value for name, value in ids.items() if isinstance(value, int)},
    }


def _dtype(tensors: list[GgufTensor]) -> str:
    """The dtype of most numbers in matrices; bfloat16 for coded ones, whose activations may not fit
    float16."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            counts[PLAIN.get(tensor.type, "bfloat16")] += tensor.num_bytes
    return counts.most_common(1)[0][0] if counts else "float32"


def _rope(read: Metadata, fields: Fields) -> Fields:
    """Parameters of rotary positions."""
    rotary, heads = read.number("rope.dimension_count"), fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] / max(1, heads)
    rope: Fields = {"partial_rotary_factor": (rotary or head_dim) / head_dim}
    kind = read.value("rope.scaling.type")
    if kind not in (None, "none"):
        rope |= {"rope_type": kind}
        rope |= {name: value for name, key in SCALING.items() if (value := read.number(key)) is not None}
    if (divisors := read.floats(FREQUENCIES)) is not None:
        rope["frequency_divisors"] = divisors
    return {"rope_parameters": {**rope, "rope_theta": fields.get("rope_theta", 10000.0)}}
