"""Multi-head latent attention (MLA) in config.json (DeepSeek-AI, 2024): the sizes of what is cached and of
what is computed from it. Torch-free."""

from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.sizes import Heads, Width

# most numbers of keys and values that a device expands from latents at once; those of one head may be more
MAX_EXPANDED = 1 << 24


class IndexerConfig(Struct, frozen=True, kw_only=True):
    """The indexer of sparse attention (layers/attention/sparse_latents.py), which chooses the tokens that a
    token attends to."""

    num_heads: int
    dim: int  # of a head, and of the index key that the cache holds for each token
    top_k: int  # tokens that a token attends to
    is_interleaved: bool = False  # as MlaConfig.is_interleaved, of the indexer's queries and keys


class MlaConfig(Struct, frozen=True, kw_only=True):
    """Sizes of latent attention. A token's keys and values of all heads follow from one latent vector; keys
    have a rotary part as well, which all heads share."""

    kv_rank: int  # size of the key/value latent
    q_rank: int | None  # size of the query latent; None: queries are computed from the hidden state itself
    nope_dim: int  # size of a head's query and key without the rotary part
    rope_dim: int
    value_dim: int
    is_interleaved: bool  # rotary dimensions 2i and 2i + 1 rotate together; else i and i + rope_dim / 2
    indexer: IndexerConfig | None = None  # None: a token attends to all before it
    query_scale: float = 1.0  # factor on the query latent, behind its norm
    latent_scale: float = 1.0  # factor on the key/value latent, behind its norm


class HfMlaConfig(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here."""

    kv_lora_rank: Width | None = None
    q_lora_rank: Width | None = None
    qk_nope_head_dim: Width | None = None
    qk_rope_head_dim: Width | None = None
    v_head_dim: Width | None = None
    rope_interleave: bool = True
    attention_bias: bool = False
    index_topk: Width | None = None
    index_head_dim: Width | None = None
    index_n_heads: Heads | None = None
    indexer_rope_interleave: bool = False
    indexer_types: list[str] | None = None
    index_topk_freq: int = 1
    index_topk_pattern: str | list[str] | None = None


def read_mla(hf: HfMlaConfig) -> MlaConfig:
    """Raises ModelError where sizes are missing or not supported."""
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
        indexer=_indexer(hf),
    )


def _indexer(hf: HfMlaConfig) -> IndexerConfig | None:
    if hf.index_topk is None:
        return None
    if hf.index_head_dim is None or hf.index_n_heads is None or hf.q_lora_rank is None:
        raise ModelError(
            "config.json has index_topk, and lacks index_head_dim, index_n_heads or q_lora_rank; "
            "restore the file from the model's source"
        )
    if hf.index_head_dim < (hf.qk_rope_head_dim or 0):
        raise ModelError(
            f"config.json: index_head_dim {hf.index_head_dim} is less than qk_rope_head_dim "
            f"{hf.qk_rope_head_dim}; restore the file from the model's source"
        )
    shares = hf.indexer_types is None and (hf.index_topk_freq > 1 or "S" in (hf.index_topk_pattern or ()))
    if shares or "shared" in (hf.indexer_types or hf.index_topk_pattern or ()):
        raise ModelError(
            "config.json: indexer_types: layers that attend to what an earlier one chose are not supported"
        )
    return IndexerConfig(
        num_heads=hf.index_n_heads,
        dim=hf.index_head_dim,
        top_k=hf.index_topk,
        is_interleaved=hf.indexer_rope_interleave,
    )
