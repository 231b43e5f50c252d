"""What comes before latent attention: from hidden states to queries, and to latents and rotary key parts in
the cache.

A device may have operators for more of it at once (`Device.prologs`); in plain steps it is two projections
for queries and one for keys, two norms, and two turns by position.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from runtime.devices.base import Ops
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.models.mla_config import Latent

Join = Callable[[Tensor], Tensor]  # of the ranks' parts: [P, ...] -> [T, ...]
Caches = tuple[Tensor, Tensor]  # latents [num_locations, 1, R] and rotary key parts [num_locations, 1, P]


class Prolog(Protocol):
    """That of one layer; `cos` and `sin` are those of Ops.rotary."""

    # rotary parts come from weights whose rows 2i and 2i + 1 turn together; else i and i + P / 2
    pairs_queries: bool
    pairs_keys: bool

    def finish(self) -> bool:
        """Called once, when the weights are complete and in this order. Whether it took the projections'
        weights as its own."""
        ...

    def takes(self, plan: Any) -> bool:
        """Whether `prepare` does steps of this plan (of Ops.plan_attention; None: one that is not known
        yet)."""
        ...

    def prepare(
        self, x: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor, up: Any
    ) -> tuple[Tensor, Tensor]:
        """All at once: from x [T, hidden] to queries and their rotary parts, in a form that the device's
        attention knows from others; latents and rotary key parts are written."""
        ...

    def project(self, x: Tensor, join: Join | None) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> queries [T, H, N + P] and latents with rotary key parts [T, R + P], before norm
        and turn. With `join` x is this rank's part of the tokens, and what comes of the first projections is
        joined."""
        ...

    def turn(self, q_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, H, P]"""
        ...

    def store(self, kv: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor) -> None:
        """kv [T, R + P]: writes normed latents and turned key parts."""
        ...


class PlainProlog:
    """In operators that every device has. Others are made of one."""

    pairs_queries = pairs_keys = False

    def __init__(
        self,
        ops: Ops,
        latent: Latent,
        num_heads: int,
        down: Linear,
        q_norm: RMSNorm | None,
        queries: Linear | None,
        kv_norm: RMSNorm,
    ) -> None:
        """`down`: to what queries are made of, or to queries, and to latents and rotary key parts, in one."""
        self.ops = ops
        self.latent = latent
        self.num_heads = num_heads
        self.down = down
        self.q_norm = q_norm
        self.queries = queries
        self.kv_norm = kv_norm
        self.split = (down.outputs["q"].size, down.outputs["kv"].size)

    def finish(self) -> bool:
        return False

    def takes(self, plan: Any) -> bool:
        return False

    def prepare(self, *_: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("it goes step by step")

    def project(self, x: Tensor, join: Join | None) -> tuple[Tensor, Tensor]:
        made = self.down.forward(x)
        q, kv = (made if join is None else join(made)).split(self.split, dim=1)
        if self.q_norm is not None and self.queries is not None:
            q = self.queries.forward(self.q_norm.forward(q))
        return q.unflatten(1, (self.num_heads, -1)), kv

    def turn(self, q_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.ops.rotary(q_rope, cos, sin)

    def store(self, kv: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor) -> None:
        latents, ropes = kv.split((self.latent.kv_rank, self.latent.rope_dim), dim=1)
        self.ops.store_kv(
            self.kv_norm.forward(latents).unsqueeze(1),
            self.ops.rotary(ropes.unsqueeze(1), cos, sin),
            *caches,
            locations,
        )
