"""The arguments of npu_fused_infer_attention_score and their documented limits.

Sources: the wheel's docstrings of both forms (torch_npu 2.13.0, _op_plugin_docs.py), [v1] and [v2]; engines
in production win where they contradict them: [vllm-ascend] is its attention_v1.py. Tilings in CANN's public
ops-transformer (c29bc10) say more: [pfa] prompt_flash_attention_tiling.cpp, [ifa] incre_flash_attention
_tiling_check.cpp, [fia] fused_infer_attention_score_tiling_check_feature.cpp, which has latent attention.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tests.ascend.emulate.int8_keys import check_int8
from tests.ascend.emulate.paged_caches import check_cache
from tests.ascend.emulate.table import Limits, need, need_contiguous, need_dtype, need_half, need_strictly

BATCHED = ("BSH", "BSND", "BNSD")
LAYOUTS = {  # input_layout -> how inputs lie; TND_NTD and the _NBSD forms are v2's
    "BSH": "BSH",
    "BSND": "BSND",
    "BNSD": "BNSD",
    "BNSD_BSND": "BNSD",
    "TND": "TND",
    "BSH_NBSD": "BSH",
    "BSND_NBSD": "BSND",
    "BNSD_NBSD": "BNSD",
    "TND_NTD": "TND",
}
V1_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")
INT_MAX = 2**31 - 1
MAX_TOKENS = 1 << 20  # of all sequences in TND: of queries [pfa], and of keys without pages
MAX_LATENT_BYTES = 1 << 20  # of TND with latents: by the size of the dtype these are its most tokens [fia]
MAX_BATCH = 1 << 16  # sequences of the branch of single tokens [ifa]
IGNORED = (
    "inner_precise",
    "antiquant_mode",
    "key_antiquant_mode",
    "value_antiquant_mode",
    "query_quant_mode",
    "key_quant_mode",
    "value_quant_mode",
)  # modes of arguments that are refused below


@dataclass(frozen=True)
class Score:
    """One call, in the names of v1."""

    query: Tensor
    key: Tensor
    value: Tensor
    version: int
    atten_mask: Tensor | None = None
    actual_seq_lengths: list[int] | None = None
    actual_seq_lengths_kv: list[int] | None = None
    block_table: Tensor | None = None
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    num_heads: int = 1
    scale: float = 1.0
    pre_tokens: int = INT_MAX
    next_tokens: int = INT_MAX
    input_layout: str = "BSH"
    num_key_value_heads: int = 0
    sparse_mode: int = 0
    block_size: int = 0
    softmax_lse_flag: bool = False
    key_antiquant_scale: Tensor | None = None
    value_antiquant_scale: Tensor | None = None

    @classmethod
    def of(cls, query: Tensor, key: Any, value: Any, version: int, arguments: dict[str, Any]) -> "Score":
        """A call of v1 or v2 of the operator."""
        known = {field.name for field in fields(cls)}
        strange = [
            name
            for name, given in arguments.items()
            if name not in known and name not in IGNORED and given is not None
        ]
        need(not strange, f"not emulated: {strange}")
        key, value = (x[0] if isinstance(x, (list, tuple)) else x for x in (key, value))
        taken = {name: given for name, given in arguments.items() if name in known and given is not None}
        for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
            if name in taken:
                taken[name] = [int(length) for length in taken[name]]
        return cls(query, key, value, version, **taken)

    @property
    def layout_in(self) -> str:
        """Layout of the queries."""
        return LAYOUTS[self.input_layout]

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.num_key_value_heads or self.num_heads

    def lengths(self, given: list[int] | None, count: int, size: int) -> list[int]:
        """One for all, or one for each [v1: actual_seq_lengths]."""
        if given is None:
            return [size] * count
        need(
            len(given) == 1 or len(given) >= count,
            f"{len(given)} lengths for {count} sequences: 1 or at least {count}",
        )
        return given * count if len(given) == 1 else given[:count]

    def num_sequences(self) -> int:
        """Sequences of the call."""
        return len(self.actual_seq_lengths or ()) if self.layout_in == "TND" else self.query.shape[0]

    def query_lengths(self) -> list[int]:
        """Queries of each sequence."""
        if self.layout_in == "TND":
            ends = self.actual_seq_lengths or []
            return [end - start for start, end in zip([0, *ends], ends, strict=False)]
        size = self.query.shape[2 if self.layout_in == "BNSD" else 1]
        return (
            [size] * self.query.shape[0]
            if size == 1
            else self.lengths(self.actual_seq_lengths, self.query.shape[0], size)
        )

    def kv_lengths(self) -> list[int]:
        """Of paged keys: each sequence's own length, also in TND [v1: actual_seq_lengths_kv, Q_S = 1;
        vllm-ascend for more]."""
        given = self.actual_seq_lengths_kv or []
        if self.block_table is not None and self.layout_in == "TND":
            need(
                len(given) == self.num_sequences(),
                f"{len(given)} kv lengths for {self.num_sequences()} sequences",
            )
            return given
        return self.lengths(given, self.num_sequences(), 0)


def check(score: Score) -> None:
    """Documented limits; raises Refused."""
    need(
        score.input_layout in (V1_LAYOUTS if score.version == 1 else LAYOUTS),
        f"input_layout {score.input_layout!r}",
    )
    check_tensors(score)
    check_query(score)
    check_mask(score)
    if score.query_rope is not None:
        check_latent(score)
    if score.block_table is not None:
        check_pages(score)
    elif score.layout_in == "TND":
        ends = score.actual_seq_lengths_kv or []
        need(len(ends) == score.num_sequences(), "TND: as many kv ends as query ends")
        need(score.key.shape[0] <= MAX_TOKENS, f"TND without pages: {score.key.shape[0]} keys, over 1M [v2]")
        need(
            rising(ends) and ends[-1] == score.key.shape[0],
            f"TND without pages: kv ends {ends} rise, up to {score.key.shape[0]} [pfa]",
        )


def rising(ends: list[int]) -> bool:
    """Whether ends never fall."""
    return all(before <= after for before, after in zip([0, *ends], ends, strict=False))


def check_tensors(score: Score) -> None:
    """Limits of dtypes and dimensions."""
    need_half(query=score.query)
    if score.key.dtype == torch.int8:
        check_int8(score)
    else:
        need_half(key=score.key, value=score.value)
        need(
            score.query.dtype == score.key.dtype == score.value.dtype, "query, key and value differ in dtype"
        )
        need(
            score.key_antiquant_scale is None and score.value_antiquant_scale is None,
            "antiquant scales are for keys in int8",
        )
    need_contiguous(
        query=score.query,
        key=score.key,
        value=score.value,
        query_rope=score.query_rope,
        key_rope=score.key_rope,
        atten_mask=score.atten_mask,
        block_table=score.block_table,
    )
    need((score.query_rope is None) == (score.key_rope is None), "query_rope and key_rope go together")
    heads, kv = score.num_heads, score.num_kv_heads
    need(0 < heads <= 256, f"num_heads {heads}: at most 256 [v1, pfa]")
    most = 64 if score.query_rope is None else 128  # of latent attention see check_latent
    need(
        heads % kv == 0 and heads // kv <= most,
        f"num_heads {heads} is no multiple, up to {most}, of num_key_value_heads {kv}",
    )


def check_query(score: Score) -> None:
    """Limits of head sizes and numbers of heads."""
    layout, query, heads = score.layout_in, score.query, score.num_heads
    need(query.dim() == {"BSH": 3, "TND": 3}.get(layout, 4), f"{layout}: query is {query.dim()}-D")
    need(query.numel() > 0, "query is empty")
    if layout == "BSH":
        need(query.shape[-1] % heads == 0, f"query's {query.shape[-1]} is no multiple of {heads} heads")
    else:
        at = {"TND": 1, "BSND": 2, "BNSD": 1}[layout]
        need(query.shape[at] == heads, f"query has {query.shape[at]} heads, num_heads is {heads}")
    size = query.shape[-1] // heads if layout == "BSH" else query.shape[-1]
    need(size <= 512, f"head size {size}: at most 512 [v1]")
    if layout == "TND":
        check_ends(score, size)
        return
    need(query.shape[0] <= MAX_BATCH, f"{query.shape[0]} sequences: at most {MAX_BATCH} [ifa]")
    lengths = score.query_lengths()
    most = query.shape[2 if layout == "BNSD" else 1]
    need(all(0 <= length <= most for length in lengths), f"query lengths {lengths} in a query of {most}")
    if most > 1:
        need(
            layout == "BNSD" or heads * size < 65535,
            "BSH and BSND with several tokens: heads * head size < 65535 [v1]",
        )
        need(size % 16 == 0, f"head size {size} with several tokens is a multiple of 16 [v1]")
    need(score.input_layout != "BNSD_BSND" or most > 1, "BNSD_BSND is for several query tokens [v1]")


def check_ends(score: Score, size: int) -> None:
    """Limits of the lists of lengths."""
    ends = score.actual_seq_lengths
    need(ends and score.actual_seq_lengths_kv, "TND needs actual_seq_lengths and actual_seq_lengths_kv")
    assert ends is not None
    need(len(ends) <= 4096, "TND: at most 4096 sequences [v2]")
    tokens = score.query.shape[0]
    need(rising(ends) and ends[-1] == tokens, f"TND: query ends {ends} rise, up to {tokens} [pfa, fia]")
    need(tokens <= MAX_TOKENS, f"TND: {tokens} queries, over 1M [pfa]")
    # [v2]; [v1] knows 192 only and no pages, but [vllm-ascend] sends 128 with pages through both. [v2] of
    # op-plugin takes heads of 64, and float16, where each query head has a key head; pages only up to 128
    if score.query_rope is None:
        has_own = score.num_heads == (score.num_key_value_heads or score.num_heads)
        sizes = (128,) if score.block_table is not None else (128, 192)
        need_strictly(has_own or score.query.dtype != torch.float16, "TND, grouped: bfloat16 only [v2]")
        need_strictly(
            size in (sizes if not has_own else (64, *sizes)), f"TND: head size {size}, not of {sizes} [v2]"
        )
        need(
            has_own or score.value.shape[-1] != 192 or score.block_table is not None,
            "TND, grouped: values of 192 [pfa]",
        )
        need(size % 16 == 0, f"head size {size} is no multiple of 16 [v1]")


def check_mask(score: Score) -> None:
    """Limits of masks and sparse modes."""
    mask, mode = score.atten_mask, score.sparse_mode
    need(mode in (0, 1, 2, 3, 4), f"sparse_mode {mode}")
    if mask is not None:
        need_dtype("atten_mask", mask, torch.bool, torch.int8, torch.uint8)
    need(mode != 1 or mask is not None, "sparse_mode 1 needs atten_mask")
    lengths = score.query_lengths()
    if mode < 2 or (max(lengths, default=0) == 1 and score.query_rope is None and mask is None):
        need(
            score.layout_in != "TND" or (mode == 0 and mask is None) or mode > 1,
            "TND: sparse_mode 0 without mask, 3 or 4 with one [v2]",
        )
        return
    need(
        mask is not None and tuple(mask.shape) in ((2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048)),
        f"sparse_mode {mode}: atten_mask is 2048 x 2048, not {None if mask is None else tuple(mask.shape)} "
        "[v1]",
    )
    need(score.layout_in != "TND" or mode != 2, "TND: sparse_mode 2 is not supported [v2]")
    if mode == 4:
        need(score.pre_tokens + score.next_tokens >= 0, "sparse_mode 4: pre_tokens + next_tokens >= 0 [v2]")
    # [v2] says "less"; a prefill without prefix is "equal" [vllm-ascend]
    if mode == 3 and score.block_table is not None:
        pairs = zip(lengths, score.kv_lengths(), strict=False)
        need(
            all(q <= kv for q, kv in pairs if kv),
            "sparse_mode 3: no more queries than keys in a sequence [v2]",
        )


def check_latent(score: Score) -> None:
    """Multi-head latent attention [v2: query_rope and key_rope]."""
    query, rope, key_rope, mode = score.query, score.query_rope, score.key_rope, score.sparse_mode
    assert rope is not None and key_rope is not None
    need(
        rope.dtype == query.dtype and key_rope.dtype == score.key.dtype,
        "rope parts have the dtype of query and key",
    )
    size = query.shape[-1] // (score.num_heads if score.layout_in == "BSH" else 1)
    rope_size = rope.shape[-1] // (score.num_heads if score.layout_in == "BSH" else 1)
    need(rope.shape[:-1] == query.shape[:-1], "query_rope differs from query in more than its last dimension")
    need_strictly(
        size in (128, 512) and rope_size == 64,
        f"latent attention: head sizes {size} and {rope_size}, not 512 or 128, and 64",
    )
    if score.block_table is None:
        need(score.layout_in == "TND", "latent attention without pages is for TND [v2]")
        need_strictly(query.dtype != torch.float16, "latent attention without pages: bfloat16 only [v2]")
        need(
            mode == 3 and score.atten_mask is not None or mode == 0 and score.atten_mask is None,
            "sparse_mode 0 without mask, 3 with one",
        )
        return
    need(score.num_kv_heads == 1, "latent attention has one key head [v2]")
    need(
        score.num_heads in (1, 2, 4, 8, 16, 32, 64, 128)
        if score.version == 2
        else score.num_heads in (32, 64, 128) or not Limits.strict,
        f"latent attention: {score.num_heads} heads [v1: 32, 64, 128; v2: powers of 2 to 128]",
    )
    tokens = MAX_LATENT_BYTES // query.element_size()
    need(
        score.layout_in != "TND" or query.shape[0] <= tokens,
        f"latent attention in TND: {query.shape[0]} queries, at most {tokens} [fia]",
    )
    most = max(score.query_lengths())
    need(most <= 16, f"latent attention with pages: at most 16 query tokens, not {most} [v1]")
    need(
        mode == 0 and score.atten_mask is None
        if most == 1 and score.layout_in != "TND"
        else mode in ((0, 3) if score.layout_in == "TND" else (3, 4)),
        "latent attention: sparse_mode 0 without a mask for one token, 3 with one for several [v2, fia]",
    )
    need(
        score.block_size in (16, 128), f"latent attention: block_size {score.block_size}, not 16 or 128 [v1]"
    )
    if score.key.dim() == 5:
        need(
            score.block_size == 128 and score.layout_in != "BNSD",
            "latent attention in NZ: block_size 128 and not BNSD [v1]",
        )


def check_pages(score: Score) -> None:
    """Limits of block tables."""
    table, size, key = score.block_table, score.block_size, score.key
    assert table is not None
    need_dtype("block_table", table, torch.int32)
    need(
        table.dim() == 2 and table.shape[0] == score.num_sequences(),
        f"block_table {tuple(table.shape)} for {score.num_sequences()}",
    )
    need(score.actual_seq_lengths_kv is not None, "pages need actual_seq_lengths_kv")
    several = max(score.query_lengths(), default=0) > 1
    if several and score.query_rope is None:
        need(
            size % 128 == 0 and 128 <= size <= 512,
            f"block_size {size} with several query tokens: 128, 256, 384 or 512 [v1]",
        )
    else:
        need(0 < size <= 512 and size % 16 == 0, f"block_size {size}: a multiple of 16, at most 512 [v1]")
    lengths = score.kv_lengths()
    need(all(length >= 0 for length in lengths), f"kv lengths {lengths}")
    need(
        max(-(-length // size) for length in lengths) <= table.shape[1],
        f"block_table of {table.shape[1]} for {max(lengths)} tokens",
    )
    need(
        score.key.shape == score.value.shape or score.query_rope is not None, "key and value differ in shape"
    )
    check_cache(score, "key", key)
    check_cache(score, "value", score.value)
    if several and score.query_rope is None:
        # the tiling of prompts counts pages that rows share once for each row
        pages = sum(-(-length // size) for length in lengths)
        need(pages <= key.shape[0], f"{pages} pages of all rows in a cache of {key.shape[0]} [pfa]")
    need(key.numel() < 2**31, f"a cache of {key.numel()} elements: less than 2**31 [v1]")
