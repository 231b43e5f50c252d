"""Diffusion models that fill in blocks of tokens: what config.json says of blocks, and the rows of families
(family.py). Torch-free."""

from collections.abc import Callable
from typing import Annotated as A

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.models.config import moe_families as experts
from runtime.models.config import sizes
from runtime.models.config.families import decoded
from runtime.models.config.family import Family

LLADA2 = "LLaDA2MoeModelLM"  # architecture and name of the family, as its name has no usual end
LLADA2_NAMES = (
    ("word_embeddings.", "embed_tokens."),
    (".attention.query_layernorm.", ".self_attn.q_norm."),
    (".attention.key_layernorm.", ".self_attn.k_norm."),
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.", ".self_attn."),
    (".gate.expert_bias", ".gate.e_score_correction_bias"),
)


class BlockDiffusion(Struct, frozen=True, kw_only=True):
    """How a model fills in tokens: block by block, each token seeing its whole block and all before it."""

    block_size: int  # tokens of a block, as the model was trained
    mask_id: int  # the token that stands where none is known


class HfBlocks(Struct, frozen=True, kw_only=True):
    """Keys of blocks, where config.json has them."""

    vocab_size: sizes.Tokens
    block_size: A[int, Meta(ge=1, le=1024)] | None = None
    mask_token_id: A[int, Meta(ge=0)] | None = None


class HfBiases(Struct, frozen=True, kw_only=True):
    """Keys of biases of LLaDA 2."""

    use_bias: bool = False
    use_qkv_bias: bool = False


def blocks(size: int, mask_id: int) -> Callable[[Fields], Fields]:
    """A reader of blocks, where config.json may leave their size and the mask to the model's own code."""

    def read(raw: Fields) -> Fields:
        hf = decoded(raw, HfBlocks)
        mask = mask_id if hf.mask_token_id is None else hf.mask_token_id
        if mask >= hf.vocab_size:
            raise ModelError(
                f"config.json: the mask is token {mask}, outside of the vocabulary of {hf.vocab_size}; set "
                "mask_token_id"
            )
        return {"diffusion": BlockDiffusion(block_size=hf.block_size or size, mask_id=mask)}

    return read


def llada2_keys(raw: Fields) -> Fields:
    """Raises ModelError for biases, which no published model has."""
    hf = decoded(raw, HfBiases)
    if hf.use_bias or hf.use_qkv_bias:
        raise ModelError("config.json: use_bias and use_qkv_bias are not supported in this family")
    return {}


SDAR_BLOCKS = blocks(4, 151669)

DIFFUSION = {
    LLADA2: Family(
        qkv_bias=False,
        o_bias=False,
        qk_norm="head",
        fused={"query_key_value": "qkv"},
        renames=LLADA2_NAMES,
        prepare=llada2_keys,
        moe=experts.deepseek3,
        read=blocks(32, 156895),
    ),
    "SDAR": Family(qk_norm="head", head_dim=128, read=SDAR_BLOCKS),
    "SDARMoe": Family(qk_norm="head", head_dim=128, moe=experts.qwen3, read=SDAR_BLOCKS),
}
