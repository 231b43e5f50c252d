"""The mixer of Mamba 2 (Dao and Gu, "Transformers are SSMs", 2024).

Each head has a state [P, N] for inputs of size P. A token with input x, time step d and vectors B, C [N],
which the heads of a group share, changes it and reads it:

    state = exp(d * A) * state + d * x Bᵀ,    y = state C + D x

A chunk of tokens is computed as the paper's section 6 does: within the chunk as masked products, as attention
is, and across chunks by their states.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from runtime.devices.base import Collectives, Device, ForwardBatch
from runtime.devices.recurrent import RecurrentKernel, RecurrentSpec
from runtime.devices.state_rows import StateRows
from runtime.layers.linear import Linear, Reduction
from runtime.layers.recurrent.parts import PartsLinear, parts_weight
from runtime.layers.recurrent.recurrence import Recurrence, in_segments, state_rows
from runtime.layers.recurrent.short_conv import CausalConv
from runtime.layers.weight import Layer, Shard, head_shards, scaled_shard
from runtime.models.config.recurrent_config import Mamba2

CHUNK = 64  # tokens that are computed as masked products
SEGMENT = 1024  # tokens whose masked products are in memory at a time


def expand_groups(x: Tensor, heads: int) -> Tensor:
    """[..., G, N] -> [..., heads, N], where the heads of a group have the same."""
    groups = x.shape[-2]
    return x.unsqueeze(-2).expand(*x.shape[:-1], heads // groups, x.shape[-1]).flatten(-3, -2)


def scan_step(a: Tensor, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of R sequences: a [H], x [R, H, P], step [R, H], b and c [R, G, N], state
    [R, H, P, N] -> y [R, H, P] and the new state. All float32."""
    x, step, b, c = inputs
    b, c = (expand_groups(vectors, x.shape[1]) for vectors in (b, c))
    decay = (step * a).exp()[:, :, None, None]
    state = state * decay + (x * step.unsqueeze(2)).unsqueeze(3) * b.unsqueeze(2)
    return (state @ c.unsqueeze(3)).squeeze(3), state


def scan_chunks(a: Tensor, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of one sequence: a [H], x [T, H, P], step [T, H], b and c [T, G, N], state [H, P, N] ->
    y [T, H, P] and the new state. All float32."""
    return in_segments(partial(_scan_segment, a), inputs, state, SEGMENT)


def _scan_segment(a: Tensor, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    x, step, b, c = inputs
    length, heads, _ = x.shape
    size = min(CHUNK, length)
    missing = -length % size
    # padding has time step 0: it leaves the state as it is
    x, b, c = (pad(part, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, size)) for part in (x, b, c))
    step = pad(step, (0, 0, 0, missing)).unflatten(0, (-1, size))
    x = x * step.unsqueeze(3)  # [n, Q, H, P]
    decay = (step * a).cumsum(1).transpose(1, 2)  # log of the decay since the chunk's begin, [n, H, Q]
    future = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    within = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(future, -torch.inf).exp()  # [n, H, Q, Q]
    scores = torch.einsum("nigs,njgs->nijg", c, b).unsqueeze(4)
    scores = scores.expand(*scores.shape[:4], heads // b.shape[2]).flatten(3).permute(0, 3, 1, 2)
    values = x.transpose(1, 2)  # [n, H, Q, P]
    out = (scores * within) @ values
    b, c = (expand_groups(vectors, heads).transpose(1, 2) for vectors in (b, c))  # [n, H, Q, N]
    ends = decay[:, :, -1:]
    added = (values * (ends - decay).exp().unsqueeze(3)).transpose(2, 3) @ b  # [n, H, P, N]
    before = []
    for chunk, kept in zip(added, ends.exp(), strict=True):
        before.append(state)
        state = state * kept.unsqueeze(2) + chunk
    out += (c * decay.exp().unsqueeze(3)) @ torch.stack(before).transpose(2, 3)
    return out.transpose(1, 2).flatten(0, 1)[:length], state


class GatedGroupNorm(Layer):
    """norm(x * silu(gate)) or norm(x) * silu(gate), by the root mean square of each group of channels. Groups
    may be spread over several ranks."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        own: Shard,
        num_groups: int,
        eps: float,
        *,
        gates_first: bool,
    ) -> None:
        self.collectives: Collectives = device.collectives
        self.weight = parts_weight(device, dtype, [own])
        self.eps = eps
        self.gates_first = gates_first
        self.size = own.full // num_groups  # channels of a group
        self.first = own.start // self.size
        self.num_groups = num_groups
        self.is_spread = device.collectives.size > num_groups  # every rank has a part of one group, or all

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """float32 x [T, C] and gate [T, C] -> [T, C] in the dtype of `gate`."""
        opened = silu(gate.float())
        if self.gates_first:
            x = x * opened
        groups = x.unflatten(1, (1, -1) if self.is_spread else (-1, self.size))
        sums = groups.square().sum(dim=2, keepdim=True)
        if self.is_spread:
            whole = torch.zeros(len(x), self.num_groups, dtype=x.dtype, device=x.device)
            whole[:, self.first] = sums[:, 0, 0]
            sums = self.collectives.all_reduce(whole)[:, self.first, None, None]
        normed = (groups * (sums / self.size + self.eps).rsqrt()).flatten(1)
        normed = normed.to(gate.dtype) * self.weight.tensor
        return normed if self.gates_first else (normed.float() * opened).to(gate.dtype)


class Mamba2Mixer(Layer):
    """Projections, convolution, scan and gated norm. Heads are split over the ranks, and groups with them."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        config: Mamba2,
        place: int,
        reduction: Reduction,
    ) -> None:
        """`place`: of the layer among the recurrent ones."""
        self.config, self.place, self.device = config, place, device
        self.kernel: RecurrentKernel | None = None  # None: torch computes
        heads, groups = head_shards(
            config.num_heads, config.num_groups, device.collectives, "heads of recurrent layers"
        )
        inner, shared = scaled_shard(heads, config.head_dim), scaled_shard(groups, config.state_dim)
        self.num_groups = groups.size
        self.in_proj = PartsLinear(
            device, dtype, hidden, [inner, inner, shared, shared, heads], bias=config.has_bias
        )
        self.conv1d = CausalConv(
            device, dtype, [inner, shared, shared], config.kernel, bias=config.has_conv_bias
        )
        self.dt_bias, self.A_log, self.D = (parts_weight(device, torch.float32, [heads]) for _ in range(3))
        self.gated_norm = (
            None
            if config.norm == "none"
            else GatedGroupNorm(
                device, dtype, inner, config.num_groups, config.eps, gates_first=config.norm == "gated"
            )
        )
        self.out_proj = Linear(
            device, dtype, inner, {"": hidden}, shard="row", bias=config.has_bias, reduction=reduction
        )

    def finish_loading(self) -> None:
        """See Layer.finish_loading."""
        if self.device.recurrent is None:
            return
        norm = self.gated_norm
        has_norm = norm is not None and not norm.is_spread  # else it takes what the kernel gives
        self.kernel = self.device.recurrent.open(
            RecurrentSpec(
                "scan",
                self.num_groups,
                len(self.D.tensor),
                self.config.state_dim,
                self.config.head_dim,
                self.conv1d.weight.tensor,
                None if self.conv1d.bias is None else self.conv1d.bias.tensor,
                self.dt_bias.tensor,
                self.A_log.tensor,
                self.D.tensor,
                self.config.step_limits,
                norm=self.config.norm if has_norm else "none" if norm is None else "nothing",
                norm_weight=norm.weight.tensor if norm is not None and has_norm else None,
                norm_size=norm.size if norm is not None and has_norm else self.config.head_dim,
                eps=self.config.eps,
            )
        )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, hidden] -> gates [T, inner], channels before the convolution, and time steps [T, H]."""
        projected, sizes = self.in_proj.forward(x), self.in_proj.sizes
        if factors := self.config.multipliers:
            parts = zip(projected.split(sizes, dim=1), factors, strict=True)
            projected = torch.cat([part * factor for part, factor in parts], dim=1)
        return projected.split([sizes[0], sum(sizes[1:4]), sizes[4]], dim=1)

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """See TokenMixer; the states of the step's sequences move on."""
        (gate, mixed, step), rows = queries, state_rows(batch)
        norm = self.gated_norm
        if self.kernel is not None:
            out = self.kernel.forward(mixed, gate, None, step, rows.tensors[self.place], rows)
            return norm.forward(out.float(), gate) if norm is not None and norm.is_spread else out
        out = self._scanned(mixed, step, rows)
        return (out * silu(gate.float())).to(gate.dtype) if norm is None else norm.forward(out, gate)

    def _scanned(self, mixed: Tensor, step: Tensor, rows: StateRows) -> Tensor:
        """Convolution and scan: float32 [T, inner]."""
        conv_state, state = rows.tensors[self.place]
        channels = silu(self.conv1d.forward(mixed, conv_state, rows)).float()
        inner, b, c = channels.split(self.in_proj.sizes[1:4], dim=1)
        inner = inner.unflatten(1, (-1, self.config.head_dim))
        b, c = (vectors.unflatten(1, (self.num_groups, -1)) for vectors in (b, c))
        step = softplus(step.float() + self.dt_bias.tensor).clamp(*self.config.step_limits)
        a = -self.A_log.tensor.exp()
        steps = self.device.state_steps
        in_place = None if steps is None else partial(steps.scan, a)
        recurrence = Recurrence(partial(scan_step, a), partial(scan_chunks, a), rates=(1,), in_place=in_place)
        out = recurrence.run((inner, step, b, c), state, rows)
        return (out + inner * self.D.tensor.unsqueeze(1)).flatten(1)
