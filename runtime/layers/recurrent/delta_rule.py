"""Delta rules: a state [K, V] for each head, a map from keys to values. A token with key k, value v, query q,
decay exp(g) and rate b replaces a part of what the state has for k, and reads it:

    state = diag(exp(g)) state,    state = state + k (b * (v - stateᵀ k))ᵀ,    out = stateᵀ q

g has one number for a head ("Gated Delta Networks", Yang et al., 2024), or one for each channel of a key
("Kimi Linear", Moonshot AI, 2025). In all functions D is 1 or K accordingly, and all tensors are float32.

A chunk of tokens is computed by the WY form: what the tokens of a chunk write is the solution of a
triangular system, in which they see one another's keys through the decays between them; across chunks the
state carries on.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.recurrent import StateSteps
from runtime.layers.recurrent.recurrence import Recurrence, in_segments

CHUNK, SEGMENT = 64, 1024  # tokens of one triangular system, and those whose systems are in memory at a time
# the same where D is K: decays are formed for each pair of tokens and channel, so chunks are short
WIDE_CHUNK, WIDE_SEGMENT = 16, 256


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1, [..., K]."""
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def delta_step(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of R sequences: q and k [R, H, K], v [R, H, V], g [R, H, D], rate [R, H], state
    [R, H, K, V] -> out [R, H, V] and the new state."""
    q, k, v, g, rate = inputs
    state = state * g.exp().unsqueeze(3)
    written = (v - (k.unsqueeze(2) @ state).squeeze(2)) * rate.unsqueeze(2)
    state = state + k.unsqueeze(3) * written.unsqueeze(2)
    return (q.unsqueeze(2) @ state).squeeze(2), state


def delta_chunks(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of one sequence: q and k [T, H, K], v [T, H, V], g [T, H, D], rate [T, H], state [H, K, V] ->
    out [T, H, V] and the new state."""
    segment = SEGMENT if inputs[3].shape[2] == 1 else WIDE_SEGMENT
    return in_segments(_delta_segment, inputs, state, segment)


def _delta_segment(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, rate = inputs
    length = len(q)
    size = min(CHUNK if g.shape[2] == 1 else WIDE_CHUNK, length)
    missing = -length % size
    # padding has rate 0 and decay 1: it leaves the state as it is; [H, n, Q, ...] from here on
    q, k, v, g, rate = (
        pad(part, (0, 0, 0, 0, 0, missing)).transpose(0, 1).unflatten(1, (-1, size))
        for part in (q, k, v, g, rate.unsqueeze(2))
    )
    decay = g.cumsum(2)  # log of the decay since the chunk's begin
    opened, rated = decay.exp(), k * rate
    scores, system = _products(q, k, rated, decay)
    sides = torch.cat((v * rate, rated * opened), dim=3)
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


def _products(q: Tensor, k: Tensor, rated: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Products [H, n, Q, Q] of q, and of k times its rate, with the keys before them, times the decays
    between the tokens. Quotients of decays are differences of logarithms, which never overflow."""
    size, columns = q.shape[2], k.transpose(2, 3)
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1).unsqueeze(2)
    between = (
        (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(future, -torch.inf).exp()
    )  # [H, n, i, j, D]
    if decay.shape[3] == 1:
        between = between.squeeze(4)
        return (q @ columns) * between, (rated @ columns) * between
    seen = between * k.unsqueeze(2)  # keys j as token i finds them
    return (seen @ q.unsqueeze(4)).squeeze(4), (seen @ rated.unsqueeze(4)).squeeze(4)


def delta_rule(steps: StateSteps | None) -> Recurrence:
    """The recurrence of a device with these steps. Without decay and rate a token leaves a state as it is."""
    in_place = None if steps is None else steps.delta
    return Recurrence(delta_step, delta_chunks, rates=(3, 4), in_place=in_place)
