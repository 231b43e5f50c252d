"""Interface of sparse latent attention (DeepSeek V3.2, 2025), in which a token attends to tokens that an
indexer chooses for it. Torch-free at run time.

Shapes: `T` tokens of a step, `H` query heads of this rank, `N` size of a head's query and key without the
rotary part, `P` size of the rotary part, `V` size of a head's value, `R` size of a latent, `J` heads of the
indexer, `I` size of an index key.
"""

from typing import TYPE_CHECKING, Protocol

from runtime.models.config.mla_config import MlaConfig

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.devices.base import AttentionPlan


class SparseLayer(Protocol):
    """Sparse latent attention of one layer."""

    def store(
        self,
        latents: "Tensor",
        ropes: "Tensor",
        index_keys: "Tensor",
        caches: "tuple[Tensor, ...]",
        locations: "Tensor",
    ) -> None:
        """Writes latents [T, 1, R], rotary keys [T, 1, P] and index keys [T, 1, I] at `locations` of the
        layer's caches."""
        ...

    def attend(
        self,
        q: "Tensor",
        q_rope: "Tensor",
        index_queries: "Tensor",
        index_weights: "Tensor",
        caches: "tuple[Tensor, ...]",
        plan: "AttentionPlan | None",
    ) -> "Tensor":
        """Attention over pages that hold the step's own tokens already: q [T, H, N], q_rope [T, H, P], index
        queries [T, J, I] and weights [T, J] -> [T, H, V]."""
        ...


class SparseLatentOps(Protocol):
    """Sparse latent attention of a device."""

    def cache_dims(self, mla: MlaConfig) -> tuple[int, ...]:
        """Sizes of what the caches of a layer hold for a token; together R + P + I."""
        ...

    def open(self, up: "Tensor", mla: MlaConfig, scale: float) -> SparseLayer:
        """The attention of a layer whose up-projection [H, N + V, R] makes each head's key (the first N rows)
        and value (the other V) from a latent. Raises ModelError for sizes that the device does not take."""
        ...
