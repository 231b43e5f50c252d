"""What comes before MLA on Ascend, in fused operators where they are documented for a model's sizes.

    plain        torch's products, then norm, rotary and store one by one
                 (layers/attention/mla_prolog.py): for every model
    cache-fused  npu_kv_rmsnorm_rope_cache norms, rotates and stores the latents. It wants rotary key parts
                 as interleaved pairs, as checkpoints have them, and stores the second of each pair behind
                 the first ones, so the cache is the same as with plain steps
    fused        npu_mla_prolog_v3 computes absorbed queries and the cache from hidden states
                 (--npu-mla-prolog), where all rows of a step are absorbed. Other steps use the same weights,
                 [in, out] in FRACTAL_NZ

CACHE_LIMITS and FUSED_LIMITS say what is documented for A2 and A3 (torch_npu's docstrings, op-plugin's and
CANN's documents).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime import log
from runtime.devices.ascend.mla_prolog_fused import (
    CacheFusedProlog,
    CacheWriter,
    FusedMatrices,
    FusedProlog,
    run_fused,
)
from runtime.errors import ModelError, StartError
from runtime.layers.attention.mla_prolog import PlainProlog, Prolog
from runtime.models.config.mla_config import MlaConfig
from runtime.models.config.quantization_schemes import Int8


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator is documented for. A size without an entry may be anything."""

    dtypes: tuple[torch.dtype, ...]
    sizes: dict[str, tuple[int, ...]]

    def missed(self, dtype: torch.dtype, sizes: dict[str, int | None]) -> str | None:
        """The first thing that the operator does not support, and what it does; None: it supports all."""
        if dtype not in self.dtypes:
            return f"{_name(dtype)}, and not {' or '.join(map(_name, self.dtypes))}"
        for name, taken in self.sizes.items():
            if sizes[name] not in taken:
                return f"{name} {sizes[name]}, and not {' or '.join(map(str, taken))}"
        return None


CACHE_LIMITS = Limits((torch.bfloat16, torch.float16), {"kv_lora_rank": (512,), "qk_rope_head_dim": (64,)})
FUSED_LIMITS = Limits(
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


def _unsupported(plain: PlainProlog) -> str | None:
    """What the fused operator has no argument for; None: nothing."""
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


class Prologs:
    """Makes the prologs of one rank's layers."""

    def __init__(
        self, page_size: int, *, wants_fused: bool, is_nz: bool, requires_fused: bool = True
    ) -> None:
        """`wants_fused`: --npu-mla-prolog; with `requires_fused` it was given as an option, else by a
        profile. `is_nz`: --npu-nz-cache."""
        self.page_size = page_size
        self.wants_fused = wants_fused
        self.requires_fused = requires_fused
        self.is_nz = is_nz
        self.is_probed = False  # whether the fused operator has been tried
        # the error of npu_kv_rmsnorm_rope_cache, if it has one; None: it has not been tried
        self.refusals: list[str] | None = None

    def open(self, plain: PlainProlog) -> Prolog:
        """The prolog of one layer. Raises ModelError where the fused operator is required and does not
        support the layer."""
        latent, dtype = plain.mla, plain.kv_norm.weight.tensor.dtype
        sizes = {
            "hidden_size": plain.down.inputs.size,
            "q_lora_rank": latent.q_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "heads of a rank": plain.num_heads,
        }
        writer = CacheWriter(plain.kv_norm, self.page_size, self.is_nz)
        missed = CACHE_LIMITS.missed(dtype, sizes) or (
            "a norm with a bias" if plain.kv_norm.shift is not None else None
        )
        if not missed and self.is_refused(writer, latent):
            missed = "to do with an NPU that lacks npu_kv_rmsnorm_rope_cache"
        if not self.wants_fused:
            return plain if missed else CacheFusedProlog(plain, writer)
        fused_missed = missed or FUSED_LIMITS.missed(dtype, sizes) or _unsupported(plain)
        if not fused_missed:
            return FusedProlog(plain, writer, None if self.is_probed else self.probe)
        if self.requires_fused:
            raise ModelError(
                f"--npu-mla-prolog does not take this model, which has {fused_missed}; leave it out"
            )
        log.get("ranks").warning(
            "the profile's --npu-mla-prolog does not support this model: latents are prepared by separate "
            "operators",
            reason=f"it has {fused_missed}",
        )
        self.wants_fused = False  # logged once
        return plain if missed else CacheFusedProlog(plain, writer)

    def is_refused(self, writer: CacheWriter, latent: MlaConfig) -> bool:
        """Whether npu_kv_rmsnorm_rope_cache fails on this NPU, tried with one token. Documents differ:
        torch_npu's list it for A2 and A3, CANN's do not."""
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
                    "latents are normed, rotated and stored by separate operators", reason=self.refusals[0]
                )
        return bool(self.refusals)

    def probe(
        self, latent: MlaConfig, matrices: FusedMatrices, norms: tuple[tuple[Tensor, float], ...]
    ) -> None:
        """Tries npu_mla_prolog_v3 with one token. Raises StartError where CANN or torch_npu lacks it."""
        self.is_probed = True
        (gamma, _), heads = norms[0], matrices.queries.weight.shape[1] // (latent.nope_dim + latent.rope_dim)
        pages = tuple(
            gamma.new_zeros(1, self.page_size, 1, size) for size in (latent.kv_rank, latent.rope_dim)
        )
        try:
            run_fused(
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
                f"--npu-mla-prolog does not work on this NPU ({_reason(error)}); leave it out, or undo a "
                "profile's by "
                "--no-npu-mla-prolog, and look at the versions of CANN and torch_npu"
            ) from error
