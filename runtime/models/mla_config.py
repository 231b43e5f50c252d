"""Multi-head latent attention in config.json (DeepSeek-AI, 2024): the sizes of what is cached and what is
computed from it. Torch-free."""

from typing import Annotated as A

from msgspec import Meta, Struct

from runtime.errors import ModelError

# most numbers of keys and values that a device makes from latents at once; those of one head may be more
MAX_EXPANDED = 1 << 24
Count = A[int, Meta(gt=0, le=2**31 - 1)]


class MlaConfig(Struct, frozen=True, kw_only=True):
    """A token's keys and values of all heads are one latent vector; keys have a rotary part besides, the same
    for all heads."""

    kv_rank: int  # of the latent
    q_rank: int | None  # of what queries are computed from; None: the hidden state itself
    nope_dim: int  # of a head's query and key, without the rotary part
    rope_dim: int
    value_dim: int
    is_interleaved: bool  # rotary dimensions 2i and 2i + 1 turn together; else i and i + rope_dim / 2


class HfMlaConfig(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here."""

    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    rope_interleave: bool = True
    attention_bias: bool = False


def read_mla(hf: HfMlaConfig) -> MlaConfig:
    """Raises ModelError."""
    if (
        hf.kv_lora_rank is None
        or hf.qk_nope_head_dim is None
        or hf.qk_rope_head_dim is None
        or hf.v_head_dim is None
    ):
        raise ModelError(
            "config.json lacks kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim or v_head_dim; "
            "restore the file from the model's source"
        )
    if hf.qk_rope_head_dim % 2:
        raise ModelError(
            f"config.json: qk_rope_head_dim {hf.qk_rope_head_dim} is odd; rotary positions need an even one"
        )
    if hf.attention_bias and hf.q_lora_rank is None:
        raise ModelError("config.json: attention_bias without q_lora_rank is not supported")
    return MlaConfig(
        kv_rank=hf.kv_lora_rank,
        q_rank=hf.q_lora_rank,
        nope_dim=hf.qk_nope_head_dim,
        rope_dim=hf.qk_rope_head_dim,
        value_dim=hf.v_head_dim,
        is_interleaved=hf.rope_interleave,
    )
