"""The delta rule of Kimi Linear ("Kimi Linear: An Expressive, Efficient Attention Architecture", 2025) behind
a causal convolution.

As gated_delta.py, with a decay exp(g) for each channel of a key:

    state = diag(exp(g)) state,    state = state + k (b * (v - stateᵀ k))ᵀ,    out = stateᵀ q

Within a chunk tokens see one another's keys through the decays between them. Their quotients of cumulative
decays are formed as differences of logarithms for each pair of tokens and channel, which never overflow; so
chunks are short.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.linear import Linear, Reduction
from runtime.layers.parallel.replicated import replicated_weight
from runtime.layers.recurrent.gated_delta import unit
from runtime.layers.recurrent.parts import parts_weight
from runtime.layers.recurrent.recurrence import Recurrence, state_rows
from runtime.layers.recurrent.short_conv import CausalConv
from runtime.layers.weight import Layer, even_shard, replicated_shard, scaled_shard
from runtime.models.config.recurrent_config import KimiDelta

CHUNK = 16  # tokens of one triangular system
SEGMENT = 256  # tokens whose systems are in memory at a time


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of R sequences: q, k, v and g [R, H, K], rate [R, H], state [R, H, K, K] -> out
    [R, H, K] and the new state. All float32."""
    state = state * g.exp().unsqueeze(3)
    written = (v - (k.unsqueeze(2) @ state).squeeze(2)) * rate.unsqueeze(2)
    state = state + k.unsqueeze(3) * written.unsqueeze(2)
    return (q.unsqueeze(2) @ state).squeeze(2), state


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens of one sequence: q, k, v and g [T, H, K], rate [T, H], state [H, K, K] -> out [T, H, K] and the
    new state. All float32."""
    outs = []
    for begin, end in pairwise([*range(0, len(q), SEGMENT), len(q)]):
        out, state = _delta_segment(*(part[begin:end] for part in (q, k, v, g, rate)), state)
        outs.append(out)
    return torch.cat(outs), state


def _delta_segment(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    length = len(q)
    size = min(CHUNK, length)
    missing = -length % size
    # padding has rate 0 and decay 1: it leaves the state as it is; [H, n, Q, K] from here on
    q, k, v, g = (
        pad(part, (0, 0, 0, 0, 0, missing)).transpose(0, 1).unflatten(1, (-1, size)) for part in (q, k, v, g)
    )
    rate = pad(rate, (0, 0, 0, missing)).T.unflatten(1, (-1, size)).unsqueeze(3)
    decay = g.cumsum(2)  # log of the decay since the chunk's begin
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1).unsqueeze(2)
    between = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(future, -torch.inf).exp()
    seen = between * k.unsqueeze(2)  # keys j as token i finds them, [H, n, i, j, K]
    scores = (seen @ q.unsqueeze(4)).squeeze(4)
    system = (seen @ (k * rate).unsqueeze(4)).squeeze(4)
    opened = decay.exp()
    sides = torch.cat((v * rate, k * rate * opened), dim=3)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[3], k.shape[3]], dim=3)
    queries = q * opened
    ends = decay[:, :, -1:]
    writers = (k * (ends - decay).exp()).transpose(2, 3)
    kept = ends.exp().transpose(2, 3)
    outs = []
    for i in range(q.shape[1]):
        written = values[:, i] - keys[:, i] @ state
        outs.append(queries[:, i] @ state + scores[:, i] @ written)
        state = state * kept[:, i] + writers[:, i] @ written
    return torch.cat(outs, dim=1).transpose(0, 1)[:length], state


# without decays and rate a token leaves a state as it is
DELTA_RULE = Recurrence(
    lambda inputs, state: delta_step(*inputs, state),
    lambda inputs, state: delta_chunks(*inputs, state),
    rates=(3, 4),
)


class SigmoidHeadNorm(Layer):
    """RMSNorm of each head, times sigmoid(gate), in float32."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        self.weight = replicated_weight(device, dtype, size)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """float32 x [T, H, K] and gate [T, H, K] -> [T, H, K] in the dtype of `gate`."""
        normed = x * (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        return (normed * self.weight.tensor.float() * gate.float().sigmoid()).to(gate.dtype)


class KimiDeltaMixer(Layer):
    """Projections, convolution, delta rule and gated norm. Heads are split over the ranks; what decays and
    gates are made of is small, and every rank has all of it."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        config: KimiDelta,
        place: int,
        reduction: Reduction,
    ) -> None:
        """`place`: of the layer among the recurrent ones."""
        self.place, self.dim = place, config.head_dim
        heads = even_shard(config.num_heads, device.collectives, "heads of recurrent layers")
        inner, low = scaled_shard(heads, self.dim), replicated_shard(self.dim)
        self.in_proj_qkv = Linear(
            device, dtype, hidden, dict.fromkeys(("q", "k", "v"), inner), shard="column"
        )
        self.low_proj = Linear(device, dtype, hidden, {"f": low, "g": low, "b": heads}, shard="column")
        self.low_sizes = (self.dim, self.dim, heads.size)
        self.f_b_proj, self.g_b_proj = (
            Linear(device, dtype, self.dim, {"": inner}, shard="column") for _ in range(2)
        )
        self.conv1d = CausalConv(device, dtype, [inner] * 3, config.kernel, bias=False, names=("q", "k", "v"))
        self.dt_bias = parts_weight(device, torch.float32, [inner])
        self.A_log = parts_weight(device, torch.float32, [heads], is_flat=True)
        self.gated_norm = SigmoidHeadNorm(device, dtype, self.dim, config.eps)
        self.out_proj = Linear(device, dtype, inner.full, {"": hidden}, shard="row", reduction=reduction)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the states of the step's sequences move on."""
        rows, dim = state_rows(batch), self.dim
        conv_state, state = rows.tensors[self.place]
        mixed = silu(self.conv1d.forward(self.in_proj_qkv.forward(x), conv_state, rows)).float()
        q, k, v = (part.unflatten(1, (-1, dim)) for part in mixed.chunk(3, dim=1))
        low_decay, low_gate, rate = self.low_proj.forward(x).split(self.low_sizes, dim=1)
        wide = self.f_b_proj.forward(low_decay.contiguous()).float() + self.dt_bias.tensor
        g = -self.A_log.tensor.exp().unsqueeze(1) * softplus(wide.unflatten(1, (-1, dim)))
        parts = unit(q) * dim**-0.5, unit(k), v, g, rate.float().sigmoid()
        out = DELTA_RULE.run(parts, state, rows)
        gate = self.g_b_proj.forward(low_gate.contiguous()).unflatten(1, (-1, dim))
        return self.out_proj.forward(self.gated_norm.forward(out, gate).flatten(1))
