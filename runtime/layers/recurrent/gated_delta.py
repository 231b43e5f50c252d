"""The gated delta rule (Yang et al., "Gated Delta Networks", 2024) behind a causal convolution.

Each head has a state [K, V], a map from keys to values. A token with key k, value v, query q, decay exp(g)
and rate b replaces a part of what the state has for k, and reads it:

    state = exp(g) * state,    state = state + k (b * (v - stateᵀ k))ᵀ,    out = stateᵀ q

A chunk of tokens is computed by the WY form of the paper: what the tokens of a chunk write is the solution of
a triangular system, in which they see one another's keys; across chunks the state carries on.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.linear import Linear, Reduction
from runtime.layers.parallel.replicated import replicated_weight
from runtime.layers.recurrent.parts import parts_weight
from runtime.layers.recurrent.short_conv import CausalConv, state_rows
from runtime.layers.weight import Layer, even_shard, scaled_shard
from runtime.models.config.recurrent_config import GatedDelta

CHUNK = 64  # tokens of one triangular system
SEGMENT = 1024  # tokens whose systems are in memory at a time


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1, [..., K]."""
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of R sequences: q and k [R, H, K], v [R, H, V], g and rate [R, H], state
    [R, H, K, V] -> out [R, H, V] and the new state. All float32."""
    state = state * g.exp()[:, :, None, None]
    written = (v - (k.unsqueeze(2) @ state).squeeze(2)) * rate.unsqueeze(2)
    state = state + k.unsqueeze(3) * written.unsqueeze(2)
    return (q.unsqueeze(2) @ state).squeeze(2), state


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens of one sequence: q and k [T, H, K], v [T, H, V], g and rate [T, H], state [H, K, V] ->
    out [T, H, V] and the new state. All float32."""
    outs = []
    for begin, end in pairwise([*range(0, len(q), SEGMENT), len(q)]):
        parts = (part[begin:end] for part in (q, k, v, g, rate))
        out, state = _delta_segment(*parts, state)
        outs.append(out)
    return torch.cat(outs), state


def _delta_segment(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    length = len(q)
    size = min(CHUNK, length)
    missing = -length % size
    # padding has rate 0 and decay 1: it leaves the state as it is; [H, n, Q, ...] from here on
    q, k, v = (
        pad(part, (0, 0, 0, 0, 0, missing)).transpose(0, 1).unflatten(1, (-1, size)) for part in (q, k, v)
    )
    g, rate = (pad(part, (0, 0, 0, missing)).T.unflatten(1, (-1, size)) for part in (g, rate))
    decay = g.cumsum(2)  # log of the decay since the chunk's begin
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    within = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(future, -torch.inf).exp()
    decayed = decay.exp().unsqueeze(3)
    rated = k * rate.unsqueeze(3)
    system = (rated @ k.transpose(2, 3)) * within
    sides = torch.cat((v * rate.unsqueeze(3), rated * decayed), dim=3)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[3], k.shape[3]], dim=3)
    scores = (q @ k.transpose(2, 3)) * within
    queries = q * decayed
    ends = decay[:, :, -1:]
    writers = (k * (ends - decay).exp().unsqueeze(3)).transpose(2, 3)
    outs = []
    for i in range(q.shape[1]):
        written = values[:, i] - keys[:, i] @ state
        outs.append(queries[:, i] @ state + scores[:, i] @ written)
        state = state * ends[:, i].exp().unsqueeze(2) + writers[:, i] @ written
    return torch.cat(outs, dim=1).transpose(0, 1)[:length], state


class GatedHeadNorm(Layer):
    """RMSNorm of each head, times silu(gate)."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int, eps: float) -> None:
        self.weight = replicated_weight(device, dtype, size)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """float32 x [T, H, V] and gate [T, H, V] -> [T, H, V] in the dtype of `gate`."""
        normed = x * (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        normed = self.weight.tensor * normed.to(gate.dtype)
        return (normed.float() * silu(gate.float())).to(gate.dtype)


class GatedDeltaMixer(Layer):
    """Projections, convolution, delta rule and gated norm. Key heads are split over the ranks, and their
    value heads with them; the projections of a key head lie together in the checkpoint (Qwen3-Next)."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        config: GatedDelta,
        place: int,
        reduction: Reduction,
    ) -> None:
        """`place`: of the layer among the recurrent ones."""
        self.config, self.place = config, place
        self.shared = config.value_heads // config.key_heads  # value heads of a key head
        keys = even_shard(config.key_heads, device.collectives, "key heads of recurrent layers")
        heads = scaled_shard(keys, self.shared)
        each = 2 * config.key_dim + 2 * self.shared * config.value_dim
        self.in_proj_qkvz = Linear(device, dtype, hidden, {"": scaled_shard(keys, each)}, shard="column")
        self.in_proj_ba = Linear(
            device, dtype, hidden, {"": scaled_shard(keys, 2 * self.shared)}, shard="column"
        )
        key_part, value_part = scaled_shard(keys, config.key_dim), scaled_shard(heads, config.value_dim)
        self.sizes = [key_part.size, key_part.size, value_part.size]
        self.conv1d = CausalConv(device, dtype, [key_part, key_part, value_part], config.kernel, bias=False)
        self.dt_bias, self.A_log = (parts_weight(device, torch.float32, [heads]) for _ in range(2))
        self.gated_norm = GatedHeadNorm(device, dtype, config.value_dim, config.eps)
        values = config.value_heads * config.value_dim
        self.out_proj = Linear(device, dtype, values, {"": hidden}, shard="row", reduction=reduction)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the states of the step's sequences move on."""
        config, rows = self.config, state_rows(batch)
        conv_state, state = rows.tensors[self.place]
        each = self.shared * config.value_dim
        fused = self.in_proj_qkvz.forward(x).unflatten(
            1, (-1, 2 * config.key_dim + 2 * each)
        )  # [T, key heads, ...]
        *qkv, gate = fused.split([config.key_dim, config.key_dim, each, each], dim=2)
        rate, step = self.in_proj_ba.forward(x).unflatten(1, (-1, 2, self.shared)).unbind(2)
        mixed = self.conv1d.forward(torch.cat([part.flatten(1) for part in qkv], dim=1), conv_state, rows)
        q, k, v = silu(mixed).float().split(self.sizes, dim=1)
        q, k = (self._spread(unit(part.unflatten(1, (-1, config.key_dim)))) for part in (q, k))
        q = q * config.key_dim**-0.5
        v = v.unflatten(1, (-1, config.value_dim))
        rate = rate.flatten(1).float().sigmoid()
        g = -self.A_log.tensor.exp() * softplus(step.flatten(1).float() + self.dt_bias.tensor)
        outs, num_decodes = [], len(rows.decodes)
        if num_decodes:
            parts = (part[:num_decodes] for part in (q, k, v, g, rate))
            out, after = delta_step(*parts, state[rows.decodes].float())
            state.index_put_((rows.decodes,), after.to(state.dtype))
            outs.append(out)
        for slot, begin, count in rows.extends:
            parts = (part[begin : begin + count] for part in (q, k, v, g, rate))
            out, after = delta_chunks(*parts, state[slot].float())
            state[slot] = after
            outs.append(out)
        gate = gate.reshape(len(x), -1, config.value_dim)
        return self.out_proj.forward(self.gated_norm.forward(torch.cat(outs), gate).flatten(1))

    def _spread(self, x: Tensor) -> Tensor:
        """[T, key heads, K] -> [T, value heads, K]."""
        return x.unsqueeze(2).expand(-1, -1, self.shared, -1).flatten(1, 2)
