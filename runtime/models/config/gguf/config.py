"""GGUF's metadata as config.json and generation_config.json have it."""

import struct
from collections import Counter
from pathlib import Path

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict
from runtime.models.config.gguf.container import Gguf, GgufTensor, Texts, Value, is_gguf, read_gguf
from runtime.models.config.gguf.tensors import sources
from runtime.models.config.gguf.types import CODED, PLAIN
from runtime.models.config.quantization_config import Quantization, read_quantization
from runtime.models.config.quantization_schemes import Ggml, WeightFormat
from runtime.regular_file import open_regular

ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
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
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
SCALING = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
GEMMA2_27B_LAYERS = 46  # the one Gemma 2 whose scores are scaled by hidden_size / num_attention_heads
FREQUENCIES = "rope_freqs.weight"  # divisors of rotary frequencies
MAX_FREQUENCIES = 1 << 16  # bytes
# ids of tokens that end an answer, and texts of control tokens that do so by other names
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TEXTS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"}
)
CONTROL = 3  # of tokenizer.ggml.token_type


def config_fields(path: str | Path) -> tuple[Fields, Fields]:
    """What config.json and generation_config.json of the model would say. Raises ModelError."""
    gguf = read_gguf(path)
    arch = gguf.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.paths[0].name} has the architecture {arch}, which is not served from GGUF files; "
            "served are "
            f"{', '.join(ARCHITECTURES)}: take the model in Hugging Face layout"
        )
    read = _Reader(gguf, str(arch))
    fields: Fields = {"architectures": [ARCHITECTURES[str(arch)]]}
    fields |= {name: read.needed(key) for name, key in SIZES.items()}
    fields |= {name: value for name, key in OPTIONAL.items() if (value := read.number(key)) is not None}
    if arch == "llama" and read.number("expert_count"):
        raise ModelError(f"{gguf.paths[0].name} is a Mixtral model, which is not served yet")
    if read.number("attention.value_length") not in (None, fields.get("head_dim")):
        raise ModelError(f"{gguf.paths[0].name}: heads of keys and values have different sizes here")
    fields |= _facts_of_tensors(gguf) | _rope(read, fields)
    if arch == "gemma2":
        is_largest = fields["num_hidden_layers"] == GEMMA2_27B_LAYERS
        heads = fields["hidden_size"] / fields["num_attention_heads"]
        fields["query_pre_attn_scalar"] = heads if is_largest else fields.get("head_dim", 256)
    else:
        fields.pop("sliding_window", None)  # the families that have one do not say here which layers
    if arch in ("qwen2moe", "qwen3moe"):
        fields["norm_topk_prob"] = arch == "qwen3moe"
        fields.setdefault("moe_intermediate_size", fields["intermediate_size"])
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
    for source in sources(read_gguf(path)):
        is_matrix = len(source.shape) == 2 and source.name.endswith(".weight")
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


class _Reader:
    """Numbers of one architecture's metadata."""

    def __init__(self, gguf: Gguf, arch: str) -> None:
        self.gguf, self.arch = gguf, arch

    def value(self, key: str) -> Value | None:
        return self.gguf.metadata.get(f"{self.arch}.{key}")

    def number(self, key: str) -> int | float | None:
        """A number; None: there is none. Raises ModelError for what is no number, or one for each layer where
        these differ."""
        value = self.value(key)
        if isinstance(value, tuple) and len(set(value)) == 1:
            value = value[0]
        if value is None or isinstance(value, int | float):
            return value
        what = "differs from layer to layer" if isinstance(value, tuple) else "is no number"
        raise ModelError(
            f"{self.gguf.paths[0].name}: {self.arch}.{key} {what}, which is not supported; take the model in "
            "Hugging Face layout"
        )

    def needed(self, key: str) -> int | float:
        """A number. Raises ModelError where there is none."""
        if (value := self.number(key)) is None:
            raise ModelError(
                f"{self.gguf.paths[0].name} has no {self.arch}.{key}; convert the model again with a newer "
                "llama.cpp"
            )
        return value


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
        "attention_bias": "blk.0.attn_q.bias" in tensors,
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


def _rope(read: _Reader, fields: Fields) -> Fields:
    """Parameters of rotary positions."""
    rotary, heads = read.number("rope.dimension_count"), fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] / max(1, heads)
    rope: Fields = {"partial_rotary_factor": (rotary or head_dim) / head_dim}
    kind = read.value("rope.scaling.type")
    if kind not in (None, "none"):
        rope |= {"rope_type": kind}
        rope |= {name: value for name, key in SCALING.items() if (value := read.number(key)) is not None}
    if (tensor := read.gguf.tensors.get(FREQUENCIES)) is not None:
        rope["frequency_divisors"] = _floats(tensor)
    return {"rope_parameters": {**rope, "rope_theta": fields.get("rope_theta", 10000.0)}}


def _floats(tensor: GgufTensor) -> list[float]:
    if tensor.type != "F32" or tensor.num_bytes > MAX_FREQUENCIES:
        raise ModelError(f"{tensor.name} is of type {tensor.type}; F32 was expected")
    with open_regular(tensor.path) as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))
