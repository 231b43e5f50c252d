"""Operators of CANN that compute more of the MLA prolog at once, and the prologs made of them; see
mla_prolog.py for when each is used."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.attention import AttentionPlan
from runtime.devices.ascend.formats import FRACTAL_NZ
from runtime.devices.ascend.mla import MlaPlan, UpProjection
from runtime.devices.base import Quantized
from runtime.layers.attention.mla_prolog import Caches, GatherTokens, PlainProlog
from runtime.layers.norm import RMSNorm
from runtime.models.config.mla_config import MlaConfig

Probe = Callable[[MlaConfig, "FusedMatrices", tuple[tuple[Tensor, float], ...]], None]
CACHE_MODES = ("PA_BSND", "PA_NZ")  # npu_mla_prolog_v3's cache_mode, by whether the cache is in NZ
QUANT_MODES = {0: 0, 1: 1, 3: 2}  # number of int8 matrices -> weight_quant_mode
CACHE_WRITE_MODES = ("PA_BNSD", "PA_NZ")  # npu_kv_rmsnorm_rope_cache's cache_mode


@dataclass(frozen=True, slots=True)
class CacheWriter:
    """Writes latents and rotary key parts to the cache with npu_kv_rmsnorm_rope_cache: norm, rotary,
    store."""

    norm: RMSNorm
    page_size: int
    is_nz: bool

    def write(self, kv: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor) -> None:
        """Norms and rotates kv [T, R + P] and stores it at `locations`.

        The operator gets the tokens as one sequence, because it wants a page for each sequence. It takes at
        most as many tokens as the cache has, so larger steps, as in a profile run on one page, take several
        calls.
        """
        latents, ropes = self.paged(caches)
        room = latents.shape[0] * self.page_size
        for at in range(0, len(kv), room):
            tokens = slice(at, at + room)
            torch_npu.npu_kv_rmsnorm_rope_cache(
                kv[tokens].contiguous()[None, None],
                self.norm.weight.tensor,
                cos[:, tokens].transpose(1, 2),
                sin[:, tokens].transpose(1, 2),
                locations[tokens],
                ropes,
                latents,
                epsilon=self.norm.eps,
                cache_mode=CACHE_WRITE_MODES[self.is_nz],
            )

    def paged(self, caches: Caches) -> Caches:
        """Caches as [pages, page size, 1, size], also in NZ, where the operators know the order within a
        page."""
        latents, ropes = (cache.view(-1, self.page_size, 1, cache.shape[2]) for cache in caches)
        return latents, ropes


def _by_token(table: Tensor) -> Tensor:
    """[1, T, 1, P] -> [T, 1, 1, P]"""
    return table.transpose(0, 1)


class CacheFusedProlog:
    """A prolog whose latents go to the cache by CacheWriter, and which is else in plain steps."""

    interleaves_queries, interleaves_keys = False, True

    def __init__(self, plain: PlainProlog, writer: CacheWriter) -> None:
        self.plain = plain
        self.store = writer.write

    def take_weights(self) -> bool:
        """False: the projections keep their weights."""
        return False

    def takes(self, plan: AttentionPlan | None) -> bool:
        """False: `prepare` does no steps."""
        return False

    def prepare(
        self, x: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor, up: UpProjection
    ) -> tuple[Tensor, Tensor]:
        """Never called."""
        raise AssertionError("--npu-mla-prolog is off")

    def project(self, x: Tensor, gather: GatherTokens | None) -> tuple[Tensor, Tensor]:
        """Plain projections; see Prolog.project."""
        return self.plain.project(x, gather)

    def rotate(self, q_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Plain rotary positions."""
        return self.plain.rotate(q_rope, cos, sin)


@dataclass(frozen=True, slots=True)
class FusedMatrix:
    """One of the projections as npu_mla_prolog_v3 takes it, in FRACTAL_NZ. All sizes of FUSED_LIMITS are
    multiples of its tiles."""

    weight: Tensor  # [in, out], in bfloat16 or int8
    scale: Tensor | None  # float32 [out], of int8

    @classmethod
    def of(cls, stored: Tensor | Quantized, rows: slice) -> "FusedMatrix":
        """Takes some rows of a stored weight [out, in]."""
        weight, scale = (
            (stored, None)
            if isinstance(stored, Tensor)
            else (stored.weight, stored.scale[rows].flatten().contiguous())
        )
        return cls(torch_npu.npu_format_cast(weight[rows].t().contiguous(), FRACTAL_NZ), scale)

    def times(self, x: Tensor, codes: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Product with x [T, in] -> [T, out]. `codes`: x in int8 and its scales, where the caller has
        them."""
        if self.scale is None:
            return torch.mm(x, self.weight)
        values, scales = codes or torch_npu.npu_dynamic_quant(x)
        return torch_npu.npu_quant_matmul(
            values, self.weight, self.scale, pertoken_scale=scales, output_dtype=x.dtype
        )


@dataclass(frozen=True, slots=True)
class FusedMatrices:
    """The three projections of npu_mla_prolog_v3."""

    down: FusedMatrix
    queries: FusedMatrix
    latents: FusedMatrix

    @classmethod
    def of(cls, plain: PlainProlog) -> "FusedMatrices":
        """Takes the weights of a plain prolog's projections."""
        assert plain.queries is not None
        stored, (at, size) = plain.down.take_weight(), plain.split
        return cls(
            FusedMatrix.of(stored, slice(0, at)),
            FusedMatrix.of(plain.queries.take_weight(), slice(None)),
            FusedMatrix.of(stored, slice(at, at + size)),
        )

    @property
    def scales(self) -> dict[str, Tensor | int]:
        """The operator's arguments for int8 projections, which are none, that of queries, or all three."""
        named = {
            "dequant_scale_w_dq": self.down,
            "dequant_scale_w_uq_qr": self.queries,
            "dequant_scale_w_dkv_kr": self.latents,
        }
        found = {
            name: matrix.scale.unsqueeze(0) for name, matrix in named.items() if matrix.scale is not None
        }
        return found | {"weight_quant_mode": QUANT_MODES[len(found)]}


def run_fused(
    x: Tensor,
    matrices: FusedMatrices,
    keys: Tensor,
    q_norm: tuple[Tensor, float],
    kv_norm: tuple[Tensor, float],
    tables: tuple[Tensor, Tensor],
    pages: Caches,
    locations: Tensor,
    is_nz: bool,
) -> tuple[Tensor, Tensor]:
    """Calls npu_mla_prolog_v3 -> absorbed queries [T, H, R] and rotary parts [T, H, P]. Norms are (weight,
    epsilon); `keys` as in UpProjection."""
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
        cache_mode=CACHE_MODES[is_nz],
        **scales,
    )
    return found[0], found[1]


class FusedProlog:
    """A prolog in one operator, npu_mla_prolog_v3, for steps whose rows are all absorbed; its weights serve
    the plain steps of other steps as well."""

    interleaves_queries = interleaves_keys = True

    def __init__(self, plain: PlainProlog, writer: CacheWriter, probe: Probe | None) -> None:
        """`probe`: called with the operator's arguments when weights are complete; None: it has been
        tried."""
        assert plain.q_norm is not None, "queries have a rank"
        self.plain: PlainProlog | None = plain  # until `take_weights`: the layer gives its weights up
        self.probe = probe
        self.num_heads, self.q_norm = plain.num_heads, plain.q_norm
        self.writer, self.store = writer, writer.write
        self.matrices: FusedMatrices | None = None

    def take_weights(self) -> bool:
        """True: the projections' weights are repacked and owned here."""
        assert self.plain is not None
        self.matrices, latent, self.plain = FusedMatrices.of(self.plain), self.plain.mla, None
        if self.probe is not None:
            self.probe(latent, self.matrices, self.norms)
        return True

    @property
    def norms(self) -> tuple[tuple[Tensor, float], ...]:
        """(weight, epsilon) of the norms of queries and of latents."""
        return tuple((norm.weight.tensor, norm.eps) for norm in (self.q_norm, self.writer.norm))

    def takes(self, plan: AttentionPlan | None) -> bool:
        """Whether all rows of the step are absorbed."""
        return plan is not None and (not isinstance(plan, MlaPlan) or not plan.expanded)

    def prepare(
        self, x: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor, up: UpProjection
    ) -> tuple[Tensor, Tensor]:
        """Absorbed queries [T, H, R] and rotary parts [T, H, P]; writes the cache."""
        assert self.matrices is not None
        return run_fused(
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
        """Queries and latents before norm and rotary; see Prolog.project."""
        matrices = self.matrices
        assert matrices is not None
        codes = None if matrices.down.scale is None else torch_npu.npu_dynamic_quant(x)
        q, kv = matrices.down.times(x, codes), matrices.latents.times(x, codes)
        if gather is not None:
            q, kv = gather(torch.cat((q, kv), 1)).split((q.shape[1], kv.shape[1]), dim=1)
        return matrices.queries.times(self.q_norm.forward(q)).unflatten(1, (self.num_heads, -1)), kv

    def rotate(self, q_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions of interleaved pairs, [T, H, P]."""
        return torch_npu.npu_interleave_rope(
            q_rope.contiguous().unsqueeze(2), _by_token(cos), _by_token(sin)
        ).squeeze(2)
