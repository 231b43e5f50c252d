"""What comes before latent attention on a GPU: between the two projections of queries one launch, where plain
operators are four, and one rotation behind them."""

from torch import Tensor

from runtime.devices.base import AttentionPlan, PackedLatent
from runtime.devices.cuda.kernels.latents import LatentNorms, prepare_latents
from runtime.layers.attention.mla_prolog import Caches, PlainProlog, Prolog
from runtime.layers.norm import RMSNorm


class CudaProlog(PlainProlog):
    """The prolog of one layer (layers/attention/mla_prolog.py)."""

    def takes(self, plan: AttentionPlan | None) -> bool:
        """True: of every step."""
        return True

    def prepare(
        self, x: Tensor, cos: Tensor, sin: Tensor, caches: Caches, locations: Tensor, up: PackedLatent
    ) -> tuple[Tensor, Tensor]:
        """See Prolog.prepare."""
        out = self.down.forward(x)
        q = prepare_latents(out, self.norms(), cos, sin, caches, locations)
        q = out[:, : self.split[0]] if q is None or self.queries is None else self.queries.forward(q)
        q, q_rope = q.unflatten(1, (self.num_heads, -1)).split((self.mla.nope_dim, self.mla.rope_dim), dim=2)
        return q, self.ops.rotary(q_rope, cos, sin)

    def norms(self) -> LatentNorms:
        """The weights of both norms. A layer's may be replaced while the server runs."""
        queries, keys = self.q_norm, self.kv_norm
        weight, eps = (None, 0.0) if queries is None else (queries.weight.tensor, queries.eps)
        return LatentNorms(weight, eps, keys.weight.tensor, keys.eps)


class CudaPrologs:
    """MlaPrologs (devices/mla_prologs.py) in Triton."""

    def open(self, plain: PlainProlog) -> Prolog:
        """The prolog of one layer; `plain` itself where a norm has a bias."""
        norms = [norm for norm in (plain.q_norm, plain.kv_norm) if norm is not None]
        if any(type(norm) is not RMSNorm or norm.shift is not None for norm in norms):
            return plain
        layers = plain.down, plain.q_norm, plain.queries, plain.kv_norm
        return CudaProlog(plain.ops, plain.mla, plain.num_heads, *layers)
