"""GGUF files of the tiny checkpoints of make.py, written by the package `gguf` as llama.cpp's converter
does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, PreTrainedModel

# families of make.py and layouts.py -> architectures of GGUF
ARCHITECTURES = {
    "arcee": "arcee",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granite_moe": "granitemoe",
    "granite_moe_shared": "granitemoe",
    "hunyuan": "hunyuan-dense",
    "internlm2": "internlm2",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "llama": "llama",
    "minimax_m2": "minimax-m2",
    "mistral": "llama",
    "mixtral": "llama",
    "nemotron": "nemotron",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
}
# that transformers has not: files of a Llama by another name
LLAMAS = ("exaone", "internlm2")
# whose queries and keys the converter reorders, and to whose norms it adds 1
PERMUTED = ("arcee", "granite", "granitemoe", "internlm2", "llama", "smollm3")
PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
# in-memory names of transformers -> those of checkpoints, which the package's map knows
CHECKPOINT_NAMES = (
    (".mlp.gate.moe_statics.", ".mlp.moe_statics."),
    (".block_sparse_moe.router.layer.", ".block_sparse_moe.gate."),
    (".block_sparse_moe.router.", ".block_sparse_moe.gate."),
    (".block_sparse_moe.experts.", ".mlp.experts."),
    (".feed_forward.experts.", ".mlp.experts."),
)
# for rows of no 256 numbers
SMALLEST = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0, Type.Q8_0: Type.F32}
QUANTIZABLE = (
    *(Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1),
    Type.MXFP4,
)
Choose = Callable[[str], Type]  # a tensor's GGUF name -> its type


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of llama.cpp's rotary positions."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def random_blocks(kind: Type, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Rows of a type that the package cannot quantize to: random codes and scales of a sensible size, in the
    file's bytes."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    halves = {
        Type.Q4_K: (0, 2),
        Type.Q5_K: (0, 2),
        Type.Q2_K: (80, 82),
        Type.Q6_K: (208,),
        Type.Q3_K: (108,),
        Type.TQ1_0: (52,),
        Type.TQ2_0: (64,),
    }
    spread = {Type.Q6_K: 5e-5, Type.Q3_K: 1e-3, Type.TQ1_0: 5e-2, Type.TQ2_0: 5e-2}.get(kind, 3e-4)
    for at in halves.get(kind, (0,)):
        scales = rng.uniform(0.5, 1.5, rows.shape[:-1]).astype(np.float16) * np.float16(spread)
        rows[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return rows.reshape(*shape[:-1], -1)


def octets_of(kind: Type, weight: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A weight in a type: the file's bytes, and the numbers that these are."""
    if kind in QUANTIZABLE:
        octets = gguf.quants.quantize(weight, kind)
    else:
        octets = random_blocks(kind, weight.shape, seed)
    return octets, gguf.quants.dequantize(octets, kind).astype(np.float32)


def write_gguf(
    folder: Path, path: Path, family: str, choose: Choose = lambda name: Type.F32, **fields: Any
) -> PreTrainedModel:
    """Writes the checkpoint of `folder` as a GGUF file, with matrices in the types that `choose` says, and
    returns transformers' model with the numbers that are in the file. `fields`: further metadata."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    arch = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, arch)
    _write_config(writer, arch, model.config)
    write_tokenizer(writer, folder)
    for key, value in fields.items():
        writer.add_string(key.replace("__", "."), value)
    for seed, piece in enumerate(_pieces(model, arch)):
        numbers, name = piece.view.numpy() + piece.more, piece.name
        kind = choose(name) if numbers.ndim > 1 else Type.F32
        if numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = SMALLEST[kind]
        given = permuted(numbers, piece.heads) if piece.heads else np.ascontiguousarray(numbers)
        octets, read = octets_of(kind, given, seed)
        writer.add_tensor(name, octets, raw_dtype=kind)
        if piece.heads:
            read = read.reshape(piece.heads, -1, 2, *read.shape[1:]).swapaxes(1, 2).reshape(read.shape)
        piece.view.copy_(torch.from_numpy(np.ascontiguousarray(read - piece.more)))
    _write_rope_factors(writer, arch, model.config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_config(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if not arch.startswith("lfm2"):
        writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "rms_norm_eps", None) is not None:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch.startswith("lfm2"):
        _write_convolutions(writer, config)
    for name in ("layer_norm_eps", "norm_epsilon", "norm_eps"):
        if getattr(config, name, None) is not None:
            writer.add_layer_norm_eps(getattr(config, name))
    if arch == "deepseek2":
        _write_latents(writer, config)
    elif getattr(config, "head_dim", None) is not None:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    _write_rope(writer, arch, config)
    for name, add in FIELDS.items():
        if getattr(config, name, None) is not None:
            getattr(writer, add)(getattr(config, name))
    window = getattr(config, "sliding_window", None)
    if arch in ("cohere2", "exaone4", "gemma2", "gemma3", "gpt-oss", "olmo2", "phi3") and window is not None:
        writer.add_sliding_window(window)
    if arch in ("cohere2", "exaone4", "gemma3", "olmo2") and window is not None:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch in ("dots1", "glm4moe"):
        writer.add_expert_weights_norm(config.norm_topk_prob)


def _write_convolutions(writer: gguf.GGUFWriter, config: Any) -> None:
    """What files of LFM 2 say besides: layers without heads of keys are convolutions."""
    heads = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
    writer.add_head_count_kv(heads)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_layer_norm_rms_eps(config.norm_eps)


def _write_latents(writer: gguf.GGUFWriter, config: Any) -> None:
    """Sizes of latent attention: of V3 as newer files have them, which describe what is cached."""
    keys, values = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_expert_weights_norm(bool(getattr(config, "norm_topk_prob", False)))
    if config.model_type == "deepseek_v2":
        writer.add_key_length(keys)
        writer.add_value_length(values)
        return
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(keys)
    writer.add_value_length_mla(values)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


# fields of config.json -> methods of the package's writer
FIELDS = {
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "num_experts": "add_expert_count",
    "num_local_experts": "add_expert_count",
    "n_routed_experts": "add_expert_count",
    "moe_num_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_k": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "shared_intermediate_size": "add_expert_shared_feed_forward_length",
    "n_shared_experts": "add_expert_shared_count",
    "moe_num_shared_experts": "add_expert_shared_count",
    "n_group": "add_expert_group_count",
    "topk_group": "add_expert_group_used_count",
    "num_dense_layers": "add_leading_dense_block_count",
    "first_k_dense_replace": "add_leading_dense_block_count",
    "moe_layer_start_index": "add_leading_dense_block_count",
    "moe_layer_interval": "add_interleave_moe_layer_step",
    "routed_scaling_factor": "add_expert_weights_scale",
    "attention_multiplier": "add_attention_scale",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "logits_scaling": "add_logit_scale",
    "logit_scale": "add_logit_scale",
}


def _write_rope(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    """Parameters of rotary positions, as the converter writes them of each family."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    theta, dim = rope["rope_theta"], getattr(config, "head_dim", None)
    dim = config.qk_rope_head_dim if arch == "deepseek2" else dim
    dim = dim or config.hidden_size // config.num_attention_heads
    if alpha := rope.get("alpha"):  # Hunyuan's base is scaled by the converter
        theta *= alpha ** (dim / (dim - 2))
    writer.add_rope_freq_base(theta)
    partial = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    writer.add_rope_dimension_count(int(dim * partial))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_rope_factors(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    """The factors of longrope, which are tensors."""
    if arch == "phi3" and "long_factor" in config.rope_parameters:
        for name in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The byte-level tokenizer of a folder."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary: dict[str, int] = dict(whole["model"]["vocab"])
    added = {token["content"]: token for token in whole["added_tokens"]}
    vocabulary |= {text: token["id"] for text, token in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [
        gguf.TokenType.NORMAL
        if token not in added
        else gguf.TokenType.CONTROL
        if added[token]["special"]
        else gguf.TokenType.USER_DEFINED
        for token in tokens
    ]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in whole["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges:
        writer.add_token_merges(merges)
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if settings.get(name):
            add(vocabulary[settings[name]])
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


class Piece(NamedTuple):
    """A tensor of a file, and where transformers' model has its numbers."""

    name: str
    view: torch.Tensor  # of the model's own memory
    more: int = 0  # which the file adds to each number
    heads: int = 0  # whose rows the file reorders; 0: it does not


def _parts(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """A tensor of the model by the names of checkpoints: stacks and fused experts taken apart."""
    if config.model_type == "gpt_oss":
        return _gpt_oss_parts(name, tensor)
    if config.model_type == "deepseek_v3" and name.endswith("kv_b_proj.weight"):
        heads = tensor.unflatten(0, (config.num_attention_heads, -1))
        keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
        base = name.removesuffix("kv_b_proj.weight")
        return {f"{base}k_b_proj.weight": keys.transpose(1, 2), f"{base}v_b_proj.weight": values}
    for theirs, ours in CHECKPOINT_NAMES:
        name = name.replace(theirs, ours)
    for end, base in (
        (".experts.gate_up_proj", ".experts."),
        (".block_sparse_moe.input_linear.weight", ".mlp.experts."),
    ):
        if name.endswith(end):
            gate, up = tensor.chunk(2, dim=1)
            base = name.removesuffix(end) + base
            return {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
    if name.endswith(".shared_mlp.input_linear.weight"):
        base, (gate, up) = name.removesuffix("shared_mlp.input_linear.weight"), tensor.chunk(2)
        return {
            f"{base}mlp.shared_experts.gate_proj.weight": gate,
            f"{base}mlp.shared_experts.up_proj.weight": up,
        }
    if name.endswith(".experts.down_proj"):
        return {f"{name}.weight": tensor}
    if name.endswith("e_score_correction_bias"):
        return {name.removesuffix("_bias") + ".bias": tensor.flatten()}
    if name.endswith(".conv.conv.weight"):
        return {name: tensor[:, 0]}
    if name.endswith(".expert_bias"):
        return {f"{name}.bias": tensor}
    if name.endswith("shared_expert_gate.weight"):
        return {name: tensor[0]}
    return {name: tensor}


def _gpt_oss_parts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of gpt-oss: gate and up apart, outputs before inputs."""
    base, _, kind = name.rpartition("experts.")
    base += "experts."
    if kind.startswith("gate_up_proj"):
        parts = {"gate_proj": tensor[..., ::2], "up_proj": tensor[..., 1::2]}
    elif kind.startswith("down_proj"):
        parts = {"down_proj": tensor}
    else:
        return {f"{name}.weight" if name.endswith(".sinks") else name: tensor}
    if kind.endswith("_bias"):
        return {f"{base}{part}.bias": view for part, view in parts.items()}
    return {f"{base}{part}.weight": view.transpose(1, 2) for part, view in parts.items()}


def _pieces(model: PreTrainedModel, arch: str) -> list[Piece]:
    """The tensors of the file, by the names that the package's own map gives them."""
    config, number = model.config, next(key for key, one in gguf.MODEL_ARCH_NAMES.items() if one == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    found = []
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for name, view in _parts(key, tensor, config).items():
            given = names.get_name(name, (".weight", ".bias"))
            assert given is not None, f"the package has no name for {name} of {arch}"
            module = given.rpartition(".")[0].rpartition(".")[2]
            is_norm = "norm" in module and given.endswith(".weight")
            more = int(arch in PLUS_ONE and is_norm)
            found.append(Piece(given, view, more, heads.get(module, 0) if arch in PERMUTED else 0))
    return found
