"""The forward pass used in training, equal to Qwen3 of transformers but leaner on a CPU.

It reads the very parameters of a `Qwen3ForCausalLM`.  Attention over short rows is written
out as matrix products, because the fused kernel is slower in bf16 on processors.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from pocket.model import ROPE_THETA, SHAPE
from pocket.tokenizer import CONTEXT

HEADS, GROUPS, SIZE = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]
WIDTH, LAYERS, EPSILON = SHAPE["hidden_size"], SHAPE["num_hidden_layers"], SHAPE["rms_norm_eps"]
FUSED_FROM = 640

Weights = dict[str, Tensor]


@cache
def _rotation() -> tuple[Tensor, Tensor]:
    frequencies = ROPE_THETA ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.outer(torch.arange(CONTEXT).float(), frequencies).repeat(1, 2)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


@cache
def _mask(length: int) -> Tensor:
    return torch.full((length, length), float("-inf"), dtype=torch.bfloat16).triu(1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def _rotate(x: Tensor) -> Tensor:
    cos, sin = _rotation()
    length = x.shape[-2]
    left, right = x.chunk(2, -1)
    return x * cos[:length] + torch.cat((-right, left), -1) * sin[:length]


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, heads, length, size = q.shape
    if length >= FUSED_FROM:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    q, k, v = (x.reshape(rows * heads, length, size) for x in (q, k, v))
    scores = torch.baddbmm(_mask(length).expand(rows * heads, -1, -1), q, k.transpose(1, 2), alpha=size**-0.5)
    return (scores.softmax(-1) @ v).view(rows, heads, length, size)


def cast(net: Qwen3ForCausalLM) -> Weights:
    """Copy the parameters to bf16 for one step, apart from the autograd graph."""
    return {name: p.detach().bfloat16() for name, p in net.named_parameters()}


def hidden(weights: Weights, ids: Tensor) -> Tensor:
    """Compute the last hidden states of padded rows."""
    rows, length = ids.shape
    x = functional.embedding(ids, weights["model.embed_tokens.weight"])
    for i in range(LAYERS):
        layer = {
            n.removeprefix(f"model.layers.{i}."): w
            for n, w in weights.items()
            if n.startswith(f"model.layers.{i}.")
        }
        h = _norm(x, layer["input_layernorm.weight"])
        q, k, v = (
            functional.linear(h, layer[f"self_attn.{n}_proj.weight"]).view(rows, length, -1, SIZE)
            for n in "qkv"
        )
        q = _rotate(_norm(q, layer["self_attn.q_norm.weight"]).transpose(1, 2))
        k = _rotate(_norm(k, layer["self_attn.k_norm.weight"]).transpose(1, 2))
        k, v = (y.repeat_interleave(HEADS // GROUPS, 1) for y in (k, v.transpose(1, 2)))
        mixed = _attend(q, k, v).transpose(1, 2).reshape(rows, length, WIDTH)
        x = x + functional.linear(mixed, layer["self_attn.o_proj.weight"])
        h = _norm(x, layer["post_attention_layernorm.weight"])
        gate = functional.silu(functional.linear(h, layer["mlp.gate_proj.weight"]))
        gate = gate * functional.linear(h, layer["mlp.up_proj.weight"])
        x = x + functional.linear(gate, layer["mlp.down_proj.weight"])
    return _norm(x, weights["model.norm.weight"])
