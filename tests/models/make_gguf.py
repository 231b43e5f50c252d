"""GGUF files of the tiny checkpoints of make.py, written by the package `gguf` as llama.cpp's converter
does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, PreTrainedModel

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SMALLEST = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}  # for rows of no 256 numbers
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
    halves = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q2_K: (80, 82), Type.Q6_K: (208,), Type.Q3_K: (108,)}
    spread = {Type.Q6_K: 5e-5, Type.Q3_K: 1e-3}.get(kind, 3e-4)
    for at in halves.get(kind, (0,)):
        scales = rng.uniform(0.5, 1.5, rows.shape[:-1]).astype(np.float16) * np.float16(spread)
        rows[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return rows.reshape(*shape[:-1], -1)


def octets_of(kind: Type, weight: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A weight in a type: the file's bytes, and the numbers that these are."""
    if kind in (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1):
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
    state = model.state_dict()
    for seed, (name, numbers) in enumerate(_tensors(model, arch).items()):
        kind = choose(name) if numbers.ndim > 1 else Type.F32
        if numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = SMALLEST[kind]
        heads = _heads(name, arch, model.config)
        given = permuted(numbers, heads) if heads else numbers
        octets, read = octets_of(kind, given, seed)
        writer.add_tensor(name, octets, raw_dtype=kind)
        if heads:
            read = read.reshape(heads, -1, 2, *read.shape[1:]).swapaxes(1, 2).reshape(read.shape)
        _put(state, name, arch, read)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(state)
    return model


def _write_config(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None) is not None:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)
    if "moe" in arch:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if arch == "qwen2moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


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


def _heads(name: str, arch: str, config: Any) -> int:
    if arch != "llama" or "attn_q." not in name and "attn_k." not in name:
        return 0
    return config.num_attention_heads if "attn_q." in name else config.num_key_value_heads


def _gguf_name(name: str, arch: str) -> str:
    stem, _, leaf = name.rpartition(".")
    block, rest = "", stem
    if stem.startswith("model.layers."):
        _, _, number, rest = stem.split(".", 3)
        block = f"blk.{number}."
    return f"{block}{(NAMES | GEMMA if arch == 'gemma2' else NAMES)[rest]}.{leaf}"


def _tensors(model: PreTrainedModel, arch: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        numbers = tensor.numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            base, half = name.removesuffix("gate_up_proj"), numbers.shape[1] // 2
            found[_gguf_name(f"{base}gate_proj.weight", arch)] = numbers[:, :half].copy()
            found[_gguf_name(f"{base}up_proj.weight", arch)] = numbers[:, half:].copy()
        elif name.endswith("experts.down_proj"):
            found[_gguf_name(f"{name}.weight", arch)] = numbers
        else:
            is_less = arch == "gemma2" and "norm" in name
            flat = numbers[0] if name.endswith("shared_expert_gate.weight") else numbers
            found[_gguf_name(name, arch)] = flat + 1 if is_less else flat
    return found


def _put(state: dict[str, torch.Tensor], name: str, arch: str, numbers: np.ndarray) -> None:
    """Writes what the file has of a tensor to the state of transformers' model."""
    for own, tensor in state.items():
        if own.endswith("experts.gate_up_proj"):
            base, half = own.removesuffix("gate_up_proj"), tensor.shape[1] // 2
            for part, rows in (("gate_proj", slice(0, half)), ("up_proj", slice(half, None))):
                if _gguf_name(f"{base}{part}.weight", arch) == name:
                    tensor[:, rows] = torch.from_numpy(numbers)
        elif _gguf_name(own if own.endswith((".weight", ".bias")) else f"{own}.weight", arch) == name:
            less = 1 if arch == "gemma2" and "norm" in own else 0
            tensor.copy_(torch.from_numpy(numbers - less).reshape(tensor.shape))
    if name == "token_embd.weight" and "output.weight" not in name and "lm_head.weight" in state:
        head = state["lm_head.weight"]
        if head.data_ptr() == state["model.embed_tokens.weight"].data_ptr():
            head.copy_(torch.from_numpy(numbers))
