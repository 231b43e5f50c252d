"""What comes before latent attention, in fused operators where they are documented for a model's sizes.

    in steps      torch's products, then norm, turn and write one by one (layers/attention/mla_prolog.py): for every model
    in parts      npu_kv_rmsnorm_rope_cache norms, turns and writes the latents. It wants key parts as pairs of neighbours, as checkpoints
                  have them, and brings the second of each pair behind the first ones: what is cached is the same in either way
    whole         npu_mla_prolog_v3 goes from hidden states to absorbed queries and the cache (--npu-mla-prolog), where all rows of a step
                  are absorbed. The others' steps use the same weights, which lie as it wants them: [in, out], in FRACTAL_NZ

PARTS and WHOLE say what is documented for A2 and A3 (torch_npu's docstrings, op-plugin's and CANN's
documents).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from torch import Tensor

from runtime import log
from runtime.devices.ascend.attention import AttentionPlan
from runtime.devices.ascend.formats import FRACTAL_NZ
from runtime.devices.ascend.mla import LatentPlan, Up
from runtime.devices.base import Quantized
from runtime.errors import ModelError, StartError
from runtime.layers.attention.mla_prolog import Caches, GatherTokens, PlainProlog, Prolog
from runtime.layers.norm import RMSNorm
from runtime.models.mla_config import MlaConfig
from runtime.models.quantization_schemes import Int8

Ask = Callable[[MlaConfig, "Matrices", tuple[tuple[Tensor, float], ...]], None]
MODES = ("PA_BSND", "PA_NZ")  # of the cache, by whether it is in NZ
QUANT_MODES = {0: 0, 1: 1, 3: 2}  # weight_quant_mode, by how many of the three matrices are int8
PART_MODES = ("PA_BNSD", "PA_NZ")  # the same in the words of the other operator


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator is documented for; no entry: anything."""

    dtypes: tuple[torch.dtype, ...]
    sizes: dict[str, tuple[int, ...]]

    def missed(self, dtype: torch.dtype, sizes: dict[str, int | None]) -> str | None:
        """The first thing that it does not take, with what it does."""
        if dtype not in self.dtypes:
            return f"{_name(dtype)}, and not {' or '.join(map(_name, self.dtypes))}"
        for name, taken in self.sizes.items():
            if sizes[name] not in taken:
                return f"{name} {sizes[name]}, and not {' or '.join(map(str, taken))}"
        return None


PARTS = Limits((torch.bfloat16, torch.float16), {"kv_lora_rank": (512,), "qk_rope_head_dim": (64,)})
WHOLE = Limits(
    (torch.bfloat16,),
    {
        "hidden_size": (7168, 7680, 6144),
        "q_lora_rank": (1536,),
        "kv_lora_rank": (512,),
        "qk_nope_head_dim": (128,),
        "qk_rope_head_dim": (64,),
        "heads of a rank": tuple(1 << i for i in range(8)),
    },
)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _odd(plain: PlainProlog) -> str | None:
    """What the whole operator has no argument for."""
    assert plain.queries is not None and plain.q_norm is not None, "queries have a rank"
    if plain.q_norm.shift is not None or plain.down.has_bias:
        return "a norm or a projection with a bias"
    schemes = tuple(
        None if linear.quantized is None else linear.quantized.scheme
        for linear in (plain.down, plain.queries)
    )
    token = Int8("token")
    if schemes in ((None, None), (None, token), (token, token)):
        return None
    return "attention weights quantised otherwise than to int8 with a scale for each token"


@dataclass(frozen=True, slots=True)
class Writer:
    """Norms latents, turns key parts, writes both."""

    norm: RMSNorm
    page_size: int
    is_nz: bool

    def write(self, kv: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor) -> None:
        """The tokens are those of one sequence to the operator: of as many as tokens it would want as many
        pages. It takes no more of them than the cache has places, which a step that is rehearsed on a single
        page exceeds."""
        latents, ropes = self.paged(caches)
        room = latents.shape[0] * self.page_size
        for at in range(0, len(kv), room):
            some = slice(at, at + room)
            torch_npu.npu_kv_rmsnorm_rope_cache(
                kv[some].contiguous()[None, None],
                self.norm.weight.tensor,
                cos[:, some].transpose(1, 2),
                sin[:, some].transpose(1, 2),
                locations[some],
                ropes,
                latents,
                epsilon=self.norm.eps,
                cache_mode=PART_MODES[self.is_nz],
            )

    def paged(self, caches: Caches) -> Caches:
        """[pages, page size, 1, size]: in NZ too, where operators know that a page lies otherwise."""
        latents, ropes = (cache.view(-1, self.page_size, 1, cache.shape[2]) for cache in caches)
        return latents, ropes


def _by_token(table: Tensor) -> Tensor:
    """[1, T, 1, P] -> [T, 1, 1, P]"""
    return table.transpose(0, 1)


class Parts:
    """The second of the ways above."""

    interleaves_queries, interleaves_keys = False, True

    def __init__(self, plain: PlainProlog, writer: Writer) -> None:
        self.plain = plain
        self.store = writer.write

    def take_weights(self) -> bool:
        return False

    def takes(self, plan: AttentionPlan | None) -> bool:
        return False

    def prepare(self, *_: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("--npu-mla-prolog is off")

    def project(self, x: Tensor, gather: GatherTokens | None) -> tuple[Tensor, Tensor]:
        return self.plain.project(x, gather)

    def rotate(self, q_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.plain.rotate(q_rope, cos, sin)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One of the projections, as the whole operator takes it: in FRACTAL_NZ. All sizes of WHOLE are multiples
    of its tiles."""

    weight: Tensor  # [in, out], in bfloat16 or int8
    scale: Tensor | None  # float32 [out], of int8

    @classmethod
    def of(cls, stored: Tensor | Quantized, rows: slice) -> "Matrix":
        weight, scale = (
            (stored, None)
            if isinstance(stored, Tensor)
            else (stored.weight, stored.scale[rows].flatten().contiguous())
        )
        return cls(torch_npu.npu_format_cast(weight[rows].t().contiguous(), FRACTAL_NZ), scale)

    def times(self, x: Tensor, codes: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """`codes`: x in int8, and its scales, if somebody has them."""
        if self.scale is None:
            return torch.mm(x, self.weight)
        given, scales = codes or torch_npu.npu_dynamic_quant(x)
        return torch_npu.npu_quant_matmul(
            given, self.weight, self.scale, pertoken_scale=scales, output_dtype=x.dtype
        )


@dataclass(frozen=True, slots=True)
class Matrices:
    """What the whole operator has besides inputs and caches."""

    down: Matrix
    queries: Matrix
    latents: Matrix

    @classmethod
    def of(cls, plain: PlainProlog) -> "Matrices":
        assert plain.queries is not None
        stored, (at, size) = plain.down.take_weight(), plain.split
        return cls(
            Matrix.of(stored, slice(0, at)),
            Matrix.of(plain.queries.take_weight(), slice(None)),
            Matrix.of(stored, slice(at, at + size)),
        )

    @property
    def scales(self) -> dict[str, Any]:
        """Arguments for those in int8: none of them, those of queries, or all."""
        named = {
            "dequant_scale_w_dq": self.down,
            "dequant_scale_w_uq_qr": self.queries,
            "dequant_scale_w_dkv_kr": self.latents,
        }
        found = {
            name: matrix.scale.unsqueeze(0) for name, matrix in named.items() if matrix.scale is not None
        }
        return found | {"weight_quant_mode": QUANT_MODES[len(found)]}


def run_whole(
    x: Tensor,
    matrices: Matrices,
    keys: Tensor,
    q_norm: tuple[Tensor, float],
    kv_norm: tuple[Tensor, float],
    tables: tuple[Tensor, Tensor],
    pages: Caches,
    locations: Tensor,
    is_nz: bool,
) -> tuple[Tensor, Tensor]:
    """The operator. Norms are weights and epsilons, `keys` as in Up."""
    scales = matrices.scales
    if matrices.down.scale is not None:
        x, of_tokens = torch_npu.npu_dynamic_quant(x)
        scales["dequant_scale_x"] = of_tokens.unsqueeze(1)
    cos, sin = (table[0, :, 0] for table in tables)
    found: tuple[Tensor, ...] = torch_npu.npu_mla_prolog_v3(
        x,
        matrices.down.weight,
        matrices.queries.weight,
        keys,
        matrices.latents.weight,
        q_norm[0],
        kv_norm[0],
        sin,
        cos,
        *pages,
        cache_index=locations,
        rmsnorm_epsilon_cq=q_norm[1],
        rmsnorm_epsilon_ckv=kv_norm[1],
        cache_mode=MODES[is_nz],
        **scales,
    )
    return found[0], found[1]


class Whole:
    """The third."""

    interleaves_queries = interleaves_keys = True

    def __init__(self, plain: PlainProlog, writer: Writer, ask: Ask | None) -> None:
        """`ask`: called once with what it has, when that is complete."""
        assert plain.q_norm is not None, "queries have a rank"
        self.plain: PlainProlog | None = plain  # until `take_weights`: the layer gives its weights up
        self.ask = ask
        self.num_heads, self.q_norm = plain.num_heads, plain.q_norm
        self.writer, self.store = writer, writer.write
        self.matrices: Matrices | None = None

    def take_weights(self) -> bool:
        assert self.plain is not None
        self.matrices, latent, self.plain = Matrices.of(self.plain), self.plain.mla, None
        if self.ask is not None:
            self.ask(latent, self.matrices, self.norms)
        return True

    @property
    def norms(self) -> tuple[tuple[Tensor, float], ...]:
        return tuple((norm.weight.tensor, norm.eps) for norm in (self.q_norm, self.writer.norm))

    def takes(self, plan: AttentionPlan | None) -> bool:
        return plan is not None and (not isinstance(plan, LatentPlan) or plan.many is None)

    def prepare(
        self, x: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor, up: Up
    ) -> tuple[Tensor, Tensor]:
        """Queries at the latents, [T, H, R]."""
        assert self.matrices is not None
        return run_whole(
            x,
            self.matrices,
            up.keys,
            *self.norms,
            (cos, sin),
            self.writer.paged(caches),
            locations,
            self.writer.is_nz,
        )

    def project(self, x: Tensor, gather: GatherTokens | None) -> tuple[Tensor, Tensor]:
        matrices = self.matrices
        assert matrices is not None
        codes = None if matrices.down.scale is None else torch_npu.npu_dynamic_quant(x)
        q, kv = matrices.down.times(x, codes), matrices.latents.times(x, codes)
        if gather is not None:
            q, kv = gather(torch.cat((q, kv), 1)).split((q.shape[1], kv.shape[1]), dim=1)
        return matrices.queries.times(self.q_norm.forward(q)).unflatten(1, (self.num_heads, -1)), kv

    def rotate(self, q_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch_npu.npu_interleave_rope(
            q_rope.contiguous().unsqueeze(2), _by_token(cos), _by_token(sin)
        ).squeeze(2)


class Prologs:
    """Makes those of one rank's layers."""

    def __init__(self, page_size: int, *, is_whole: bool, is_nz: bool, needs_whole: bool = True) -> None:
        """`is_whole`: --npu-mla-prolog, which somebody said (`needs_whole`) or a profile; `is_nz`:
        --npu-nz-cache."""
        self.page_size = page_size
        self.is_whole = is_whole
        self.needs_whole = needs_whole
        self.is_nz = is_nz
        self.is_asked = False  # the whole operator
        # of the other one: what it answered, if that was no; None: it has not been asked
        self.refusals: list[str] | None = None

    def open(self, plain: PlainProlog) -> Prolog:
        """Raises ModelError where the whole operator is wished for and does not take this layer."""
        latent, dtype = plain.mla, plain.kv_norm.weight.tensor.dtype
        sizes = {
            "hidden_size": plain.down.inputs.size,
            "q_lora_rank": latent.q_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "heads of a rank": plain.num_heads,
        }
        writer = Writer(plain.kv_norm, self.page_size, self.is_nz)
        missed = PARTS.missed(dtype, sizes) or (
            "a norm with a bias" if plain.kv_norm.shift is not None else None
        )
        if not missed and self.refused(writer, latent):
            missed = "to do with an NPU that lacks npu_kv_rmsnorm_rope_cache"
        if not self.is_whole:
            return plain if missed else Parts(plain, writer)
        whole_missed = missed or WHOLE.missed(dtype, sizes) or _odd(plain)
        if not whole_missed:
            return Whole(plain, writer, None if self.is_asked else self.ask)
        if self.needs_whole:
            raise ModelError(
                f"--npu-mla-prolog does not take this model, which has {whole_missed}; leave it out"
            )
        log.get("ranks").warning(
            "the profile's --npu-mla-prolog does not take this model: latents are prepared step by step",
            reason=f"it has {whole_missed}",
        )
        self.is_whole = False  # said once
        return plain if missed else Parts(plain, writer)

    def refused(self, writer: Writer, latent: MlaConfig) -> bool:
        """Whether the operator that norms, turns and writes does not work here, by one token. Documents
        differ on it: torch_npu's have it for A2 and A3, CANN's do not. Without it the steps are those of
        other models."""
        if self.refusals is None:
            like = writer.norm.weight.tensor
            caches = tuple(
                like.new_zeros(self.page_size, 1, size) for size in (latent.kv_rank, latent.rope_dim)
            )
            table = like.new_zeros(1, 1, 1, latent.rope_dim)
            try:
                writer.write(
                    like.new_zeros(1, latent.kv_rank + latent.rope_dim),
                    table,
                    table,
                    caches,
                    torch.zeros(1, dtype=torch.int64, device=like.device),
                )
                torch.npu.synchronize()
                self.refusals = []
            except (AttributeError, RuntimeError) as error:
                self.refusals = [_reason(error)]
                log.get("ranks").warning(
                    "latents are normed, turned and written by separate operators", reason=self.refusals[0]
                )
        return bool(self.refusals)

    def ask(self, latent: MlaConfig, matrices: Matrices, norms: tuple[tuple[Tensor, float], ...]) -> None:
        """One token through the operator. A CANN or torch_npu without it is a StartError, not the death of a
        step."""
        self.is_asked = True
        (gamma, _), heads = norms[0], matrices.queries.weight.shape[1] // (latent.nope_dim + latent.rope_dim)
        pages = tuple(
            gamma.new_zeros(1, self.page_size, 1, size) for size in (latent.kv_rank, latent.rope_dim)
        )
        try:
            run_whole(
                gamma.new_zeros(1, len(matrices.down.weight)),
                matrices,
                gamma.new_zeros(heads, latent.nope_dim, latent.kv_rank),
                *norms,
                (gamma.new_zeros(1, 1, 1, latent.rope_dim),) * 2,
                pages,
                torch.zeros(1, dtype=torch.int64, device=gamma.device),
                self.is_nz,
            )
            torch.npu.synchronize()
        except (AttributeError, RuntimeError) as error:
            raise StartError(
                f"--npu-mla-prolog does not work on this NPU ({_reason(error)}); leave it out, or undo a profile's by "
                "--no-npu-mla-prolog, and look at the versions of CANN and torch_npu"
            ) from error
