"""The prolog of multi-head latent attention (MLA): from hidden states to queries, and to latents and rotary
keys in the cache.

A device may have operators that do more of it at once (`Device.prologs`). In plain operators it is two
projections for queries and one for keys, two norms, and two rotations.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from runtime.devices.base import AttentionPlan, Ops, PackedLatent
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.models.config.mla_config import MlaConfig

GatherTokens = Callable[[Tensor], Tensor]  # all-gathers sequence-parallel shards: [P, ...] -> [T, ...]
Caches = tuple[Tensor, Tensor]  # latents [num_locations, 1, R] and rotary keys [num_locations, 1, P]


class Prolog(Protocol):
    """The MLA prolog of one layer. `cos` and `sin` are the tables of Ops.rotary."""

    # The rows of the weights that make rotary parts: True: rows 2i and 2i + 1 rotate together; False: rows i
    # and
    # i + P / 2.
    interleaves_queries: bool
    interleaves_keys: bool

    def take_weights(self) -> bool:
        """Called once, when the weights are loaded and in the order that it wants. Returns whether it took
        the projections' weights as its own."""
        ...

    def takes(self, plan: AttentionPlan | None) -> bool:
        """Whether `prepare` can compute steps with this attention plan (of Ops.plan_attention). None: a plan
        that is not known yet."""
        ...

    def prepare(
        self, x: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor, up: PackedLatent
    ) -> tuple[Tensor, Tensor]:
        """The whole prolog at once: x [T, hidden] -> queries and their rotary parts, in a form that the
        device's attention can tell from that of `project`. Writes latents and rotary keys to the cache."""
        ...

    def project(self, x: Tensor, gather: GatherTokens | None) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> queries [T, H, N + P], and latents with rotary keys [T, R + P], before norm and
        rotation. With `gather`, x is this rank's shard of the tokens, and the output of the first projections
        is gathered."""
        ...

    def rotate(self, q_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the rotary parts of queries: [T, H, P] -> [T, H, P]."""
        ...

    def store(self, kv: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor) -> None:
        """kv [T, R + P]: writes normalized latents and rotated keys to the cache."""
        ...


class PlainProlog:
    """The prolog in operators that every device has. Prologs of devices are made from one."""

    interleaves_queries = interleaves_keys = False

    def __init__(
        self,
        ops: Ops,
        mla: MlaConfig,
        num_heads: int,
        down: Linear,
        q_norm: RMSNorm | None,
        queries: Linear | None,
        kv_norm: RMSNorm,
    ) -> None:
        """`down`: the fused projection to query latents (or queries, where there are no query latents) and to
        key/value latents with rotary keys. `queries`: from query latents to queries."""
        self.ops = ops
        self.mla = mla
        self.num_heads = num_heads
        self.down = down
        self.q_norm = q_norm
        self.queries = queries
        self.kv_norm = kv_norm
        self.split = (down.outputs["q"].size, down.outputs["kv"].size)

    def take_weights(self) -> bool:
        """False: the layer packs its projections itself."""
        return False

    def takes(self, plan: AttentionPlan | None) -> bool:
        """False: every step is computed operator by operator."""
        return False

    def prepare(self, *_: object) -> tuple[Tensor, Tensor]:
        """Never called, as `takes` is always False."""
        raise AssertionError("the plain prolog is computed step by step")

    def project(self, x: Tensor, gather: GatherTokens | None) -> tuple[Tensor, Tensor]:
        """See Prolog.project."""
        out = self.down.forward(x)
        q, kv = (out if gather is None else gather(out)).split(self.split, dim=1)
        if self.q_norm is not None and self.queries is not None:
            q = self.queries.forward(self.q_norm.forward(q))
        return q.unflatten(1, (self.num_heads, -1)), kv

    def rotate(self, q_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Prolog.rotate."""
        return self.ops.rotary(q_rope, cos, sin)

    def store(self, kv: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor) -> None:
        """See Prolog.store."""
        self.ops.store_kv(*self.keys(kv, cos, sin), *caches, locations)

    def keys(self, kv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """kv [T, R + P] -> what `store` writes: normalized latents [T, 1, R] and rotated keys [T, 1, P]."""
        latents, ropes = kv.split((self.mla.kv_rank, self.mla.rope_dim), dim=1)
        return self.kv_norm.forward(latents).unsqueeze(1), self.ops.rotary(ropes.unsqueeze(1), cos, sin)
