"""Kernels of recurrent layers, of every instruction set that this machine runs, against the definition in
float64 and against themselves whatever the rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from runtime.devices.cpu.kernels import library
from runtime.devices.cpu.kernels.levels import Level, supported_levels
from runtime.devices.cpu.matrices import Threads
from runtime.devices.cpu.recurrent import CpuRecurrent
from runtime.devices.recurrent import RecurrentSpec
from runtime.devices.state_rows import StateRows, VerifyRows

BUILT = [level for level in supported_levels() if level.path.is_file()]
NUM_SLOTS = 7


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def delta(key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int = 4) -> RecurrentSpec:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return RecurrentSpec(
        "delta",
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        random(channels, 1, kernel, seed=1, scale=0.5),
        step_bias=random(value_heads, seed=2),
        log_decay=random(value_heads, seed=3, scale=0.5),
        norm="before_gate",
        norm_weight=random(value_dim, seed=4),
        norm_size=value_dim,
    )


def scan(groups: int, heads: int, state_dim: int, head_dim: int, **more: Any) -> RecurrentSpec:
    channels = 2 * groups * state_dim + heads * head_dim
    spec = RecurrentSpec(
        "scan",
        groups,
        heads,
        state_dim,
        head_dim,
        random(channels, 1, 4, seed=1, scale=0.5),
        random(channels, seed=5, scale=0.3),
        random(heads, seed=2),
        random(heads, seed=3, scale=0.5),
        random(heads, seed=6),
        norm="gated",
        norm_weight=random(heads * head_dim, seed=4),
        norm_size=heads * head_dim // groups,
        eps=1e-5,
    )
    return replace(spec, **more)


# sizes of models, and sizes that fill no vector
CASES = {
    "delta 128 x 128": delta(2, 4, 128, 128),
    "delta 12 x 20": delta(3, 3, 12, 20, kernel=2),
    "scan 128 x 64": scan(1, 4, 128, 64),
    "scan 16 x 10, limits": scan(2, 4, 16, 10, step_limits=(0.3, 0.9), norm="before_gate"),
    "scan, a gate alone": scan(2, 2, 24, 8, norm="none", norm_weight=None, norm_size=8),
    "scan, neither": scan(1, 3, 40, 33, norm="nothing", norm_weight=None, norm_size=33, conv_bias=None),
    "convolution": RecurrentSpec("conv", 1, 1, 1, 1, random(300, 1, 3, seed=1), random(300, seed=2)),
}


@pytest.fixture(params=BUILT, ids=lambda level: level.name)
def kernels(request: pytest.FixtureRequest) -> CpuRecurrent:
    level: Level = request.param
    return CpuRecurrent(Threads(library.Library(level), 2))


def inputs_of(spec: RecurrentSpec, count: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """mixed, gate, rate and step; lines of wider tensors, as projections give them."""
    sizes = (len(spec.conv_weight), spec.value_heads * spec.value_dim, spec.value_heads, spec.value_heads)
    parts = random(count, sum(sizes), seed=count).to(dtype).split(sizes, dim=1)
    return [parts[0], None, None, None] if spec.kind == "conv" else list(parts)


def states_of(spec: RecurrentSpec, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    channels, _, kernel = spec.conv_weight.shape
    tails = random(NUM_SLOTS, channels, kernel - 1, seed=8).to(dtype)
    heads, size = spec.value_heads, (spec.key_dim, spec.value_dim)
    if spec.kind == "conv":
        return (tails,)
    return tails, random(NUM_SLOTS, heads, *(size if spec.kind == "delta" else size[::-1]), seed=9).to(dtype)


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def defined(
    spec: RecurrentSpec, inputs: list[Any], states: tuple[Tensor, ...], slot: int
) -> tuple[Tensor, list[Tensor]]:
    """One row in float64, token by token. -> outputs, and the states behind it"""
    mixed, gate, rate, step = (None if x is None else x.double() for x in inputs)
    assert mixed is not None
    weight = spec.conv_weight[:, 0].double()
    window, outs = states[0][slot].double(), []
    state = None if spec.kind == "conv" else states[1][slot].double()
    for t in range(len(mixed)):
        window = torch.cat((window, mixed[t].unsqueeze(1)), dim=1)
        x = (window * weight).sum(1)
        x = x if spec.conv_bias is None else x + spec.conv_bias.double()
        window = window[:, 1:]
        if state is None:
            outs.append(x)
            continue
        assert gate is not None and step is not None and rate is not None
        assert spec.step_bias is not None and spec.log_decay is not None
        sizes = [spec.key_heads * spec.key_dim] * 2 + [spec.value_heads * spec.value_dim]
        q, k, v = silu(x).split(sizes if spec.kind == "delta" else [sizes[2], *sizes[:2]])
        if spec.kind == "scan":
            v, k, q = q, k, v
        shared = spec.value_heads // spec.key_heads
        q, k = (part.view(-1, spec.key_dim).repeat_interleave(shared, 0) for part in (q, k))
        v = v.view(-1, spec.value_dim)
        time = softplus(step[t] + spec.step_bias.double())
        decay = -spec.log_decay.double().exp()
        if spec.kind == "delta":
            state = state * (decay * time).exp()[:, None, None]
            k, q = unit(k), unit(q) * spec.key_dim**-0.5
            written = (v - (k.unsqueeze(1) @ state).squeeze(1)) * rate[t].sigmoid().unsqueeze(1)
            state = state + k.unsqueeze(2) * written.unsqueeze(1)
            out = (q.unsqueeze(1) @ state).squeeze(1)
        else:
            time = time.clamp(*spec.step_limits)
            state = state * (decay * time).exp()[:, None, None]
            state = state + (v * time.unsqueeze(1)).unsqueeze(2) * k.unsqueeze(1)
            out = (state @ q.unsqueeze(2)).squeeze(2)
            out = out if spec.skip is None else out + v * spec.skip.double().unsqueeze(1)
        outs.append(normed(spec, out.flatten(), gate[t]))
    return torch.stack(outs), [window, *([] if state is None else [state])]


def normed(spec: RecurrentSpec, out: Tensor, gate: Tensor) -> Tensor:
    if spec.norm == "nothing":
        return out
    out = out * silu(gate) if spec.norm != "before_gate" else out
    if spec.norm_weight is not None:
        groups = out.view(-1, spec.norm_size)
        groups = groups * (groups.square().mean(1, keepdim=True) + spec.eps).rsqrt()
        weight = spec.norm_weight.double()
        out = (groups.view(-1, len(weight)) * weight).flatten()
    return out * silu(gate) if spec.norm == "before_gate" else out


def part(inputs: list[Any], begin: int, count: int) -> list[Any]:
    return [None if x is None else x[begin : begin + count] for x in inputs]


def close(found: Tensor, wanted: Tensor, bound: float = 3e-5) -> bool:
    return bool((found - wanted).abs().max() <= bound * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_step(case: str, kernels: CpuRecurrent) -> None:
    """Decode rows, rows of drafts between others, and prompts of less and more than a block."""
    spec = CASES[case]
    layer, states, inputs = kernels.open(spec), states_of(spec), inputs_of(spec, 88)
    assert layer is not None
    ranges = ((4, 4, 3), (5, 10, 5))
    tokens = torch.tensor([4, 5, 6, 10, 11, 12, 13, 14])
    verifies = VerifyRows(ranges, torch.tensor([4, 5]), tokens.view(2, 4), tokens, tokens)
    rows = StateRows([states], torch.tensor([2, 3]), ((1, 2, 2), (6, 7, 3), (0, 15, 73)), verifies)
    before = tuple(state.clone() for state in states)
    out = layer.forward(*inputs, states, rows)
    own = [(2, 0, 1), (3, 1, 1), *ranges, *rows.extends]
    for slot, begin, count in own:
        wanted, after = defined(spec, part(inputs, begin, count), before, slot)
        assert close(out[begin : begin + count], wanted)
        if (slot, begin, count) not in ranges:
            assert all(close(state[slot], x) for state, x in zip(states, after, strict=True))
    for slot in (4, 5):
        assert all(torch.equal(state[slot], x[slot]) for state, x in zip(states, before, strict=True))
    (advance,) = verifies.advances
    advance(torch.tensor([0, 2]), torch.tensor([4, 1]))  # the second is kept elsewhere
    advance(torch.tensor([3, 4]), torch.tensor([4, 5]))
    for slot, target, begin, count in ((5, 1, 10, 2), (4, 4, 4, 3), (5, 5, 10, 4)):
        _, after = defined(spec, part(inputs, begin, count), before, slot)
        assert all(close(state[target], x) for state, x in zip(states, after, strict=True))


@pytest.mark.parametrize("case", ["delta 128 x 128", "scan 128 x 64", "convolution"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_16_bits(case: str, dtype: torch.dtype, kernels: CpuRecurrent) -> None:
    """Inputs, outputs and states; within their rounding."""
    spec = CASES[case]
    layer, states, inputs = kernels.open(spec), states_of(spec, dtype), inputs_of(spec, 6, dtype)
    assert layer is not None
    before = tuple(state.clone() for state in states)
    rows = StateRows([states], torch.tensor([2]), ((1, 1, 5),))
    out = layer.forward(*inputs, states, rows)
    assert out.dtype == dtype
    for slot, begin, count in ((2, 0, 1), (1, 1, 5)):
        wanted, after = defined(spec, part(inputs, begin, count), before, slot)
        assert close(out[begin : begin + count].double(), wanted, 0.008)
        assert all(close(state[slot].double(), x, 0.008) for state, x in zip(states, after, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_same_bits_in_any_company(case: str, kernels: CpuRecurrent) -> None:
    """Alone, among others, and as a row of drafts, which decodes token by token."""
    spec = CASES[case]
    layer, inputs = kernels.open(spec), inputs_of(spec, 40)
    assert layer is not None
    states = states_of(spec)
    together = layer.forward(*inputs, states, StateRows([states], torch.tensor([1, 2, 3]), ((4, 3, 37),)))
    alone = states_of(spec)
    for slot in (1, 2, 3):
        rows = StateRows([alone], torch.tensor([slot]))
        out = layer.forward(*part(inputs, slot - 1, 1), alone, rows)
        assert torch.equal(out[0], together[slot - 1])
    rows = StateRows([alone], torch.tensor([], dtype=torch.int64), ((4, 0, 37),))
    assert torch.equal(layer.forward(*part(inputs, 3, 37), alone, rows), together[3:])
    assert all(torch.equal(*pair) for pair in zip(states, alone, strict=True))
    drafted = states_of(spec)
    tokens = torch.arange(3)
    verifies = VerifyRows(((4, 0, 3),), torch.tensor([4]), tokens.view(1, 3), tokens, tokens)
    rows = StateRows([drafted], torch.tensor([], dtype=torch.int64), (), verifies)
    found = layer.forward(*part(inputs, 0, 3), drafted, rows)
    for token in range(3):
        rows = StateRows([drafted], torch.tensor([4]))
        assert torch.equal(layer.forward(*part(inputs, token, 1), drafted, rows)[0], found[token])


def test_what_there_is_no_kernel_for(kernels: CpuRecurrent) -> None:
    assert kernels.open(delta(1, 1, 2048, 8)) is None
    assert kernels.open(delta(1, 1, 16, 8, kernel=9)) is None
