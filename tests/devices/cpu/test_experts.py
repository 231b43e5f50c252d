"""Experts by the kernels of every instruction set that this machine runs, against float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cpu.expert_phases import ExpertPhases
from runtime.devices.cpu.kernels import library
from runtime.devices.cpu.kernels.levels import Level, supported_levels
from runtime.devices.cpu.kernels.library import Step
from runtime.devices.cpu.matrices import Matrix, Threads, pack
from runtime.devices.cpu.moe import CpuExperts, ExpertStack
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.cpu.program import Buffer, Program, Then
from runtime.devices.decoder_spec import DenseSpec, ExpertsSpec, LinearSpec, NormSpec
from runtime.layers.moe.routing import route
from runtime.layers.quantization.dequantize import dequantized
from runtime.layers.quantization.module_shard import pack_codes
from runtime.models.config.moe_config import Routing
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt
from runtime.models.gpt_oss import clamped, gate_above_up

BUILT = [level for level in supported_levels() if level.path.is_file()]
COUNT, HIDDEN, INNER, TOP_K = 5, 128, 72, 2  # halves of 72 are no whole blocks


@pytest.fixture(params=BUILT, ids=lambda level: level.name)
def threads(request: pytest.FixtureRequest) -> Threads:
    level: Level = request.param
    return Threads(library.Library(level), 2)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixed(x: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The definition, float64 [T, hidden]."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(gate_up)):
        gate, up = (x.double() @ gate_up[expert].double().T).chunk(2, 1)
        result = torch.nn.functional.silu(gate) * up @ down[expert].double().T
        out += result * (shares * (ids == expert)).sum(1, keepdim=True)
    return out


def routed(count: int, kind: str) -> tuple[Tensor, Tensor]:
    """Ids and weights of `count` tokens. No token goes to expert 2; "others": some experts are other
    ranks'."""
    seeded = np.random.default_rng(count)
    if kind == "one":
        ids = np.tile([3, 4], (count, 1))
    else:
        choice = [-1, 0, 1, 3, 4, 7, 300] if kind == "others" else [0, 1, 3, 4]
        ids = np.stack([seeded.permutation(choice)[:TOP_K] for _ in range(count)])
    return torch.from_numpy(ids).long(), random(count, TOP_K, seed=count).abs()


def weights_of(kind: str, rows: int, columns: int, seed: int) -> Tensor | Quantized:
    if kind not in ("int8", "int4", "fp8"):
        return (random(COUNT, rows, columns, seed=seed) / columns**0.5).to(getattr(torch, kind))
    seeded = torch.Generator().manual_seed(seed)
    if kind == "int8":
        codes = torch.randint(-127, 128, (COUNT, rows, columns), generator=seeded, dtype=torch.int8)
        return Quantized(Int8(), codes, random(COUNT, rows, 1, seed=seed).abs() / 400)
    if kind == "fp8":
        numbers = (random(COUNT, rows, columns, seed=seed) * 90).to(torch.float8_e4m3fn)
        return Quantized(Fp8(), numbers, random(COUNT, rows, 1, seed=seed).abs() / 900)
    given = torch.randint(0, 16, (COUNT, rows, columns), generator=seeded, dtype=torch.uint8)
    scale = random(COUNT, rows, columns // 32, seed=seed).abs() / 40
    return Quantized(PackedInt(4, 32), pack_codes(given.flatten(0, 1), 4).unflatten(0, (COUNT, rows)), scale)


# weights, and what a result may be off by, as a share of the results' norm: inputs in 8 bits cost more
KINDS = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 2e-6, "int8": 0.03, "int4": 0.03, "fp8": 6e-3}


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_one_call(threads: Threads, kind: str) -> None:
    """An expert without tokens, experts of other ranks, all tokens at one expert (two panels of rows). A
    token has the same bits alone."""
    inner = INNER if kind != "int4" else 96  # whole groups
    experts = CpuExperts(CpuOps(torch.bfloat16, threads))
    gate_up, down = weights_of(kind, 2 * inner, HIDDEN, 1), weights_of(kind, HIDDEN, inner, 2)
    if isinstance(gate_up, Quantized) and isinstance(down, Quantized):
        full = [dequantized(weight, torch.float32) for weight in (gate_up, down)]
        packed = experts.pack_quantized(gate_up, down)
    else:
        assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
        full = [gate_up, down]
        packed = experts.pack(gate_up, down)
    assert isinstance(packed, ExpertStack)
    for count, choice in ((1, "all"), (7, "others"), (40, "all"), (130, "one")):
        x, (ids, shares) = random(count, HIDDEN, seed=count), routed(count, choice)
        found = experts.apply(x, ids, shares, packed)
        wanted = mixed(x, ids, shares, *full)
        assert (found - wanted).norm() < KINDS[kind] * wanted.norm()
        for row in (0, count // 2, count - 1):
            one = slice(row, row + 1)
            assert torch.equal(experts.apply(x[one], ids[one], shares[one], packed)[0], found[row])


def test_experts_with_biases_and_clamped_gates(threads: Threads) -> None:
    """Those of gpt-oss, with halves that are beyond the limits."""
    experts, inner = CpuExperts(CpuOps(torch.float32, threads)), 24
    gate_up, down = random(COUNT, 2 * inner, HIDDEN, seed=1), random(COUNT, HIDDEN, inner, seed=2)
    biases = random(COUNT, 2 * inner, seed=3), random(COUNT, HIDDEN, seed=4)
    packed = experts.pack_clamped(gate_above_up(gate_up), down, (gate_above_up(biases[0]), biases[1]))
    assert packed is not None
    x, (ids, shares) = random(7, HIDDEN, seed=7), routed(7, "all")
    wanted = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(COUNT):
        both = x.double() @ gate_up[expert].double().T + biases[0][expert].double()
        result = clamped(both) @ down[expert].double().T + biases[1][expert].double()
        wanted += result * (shares * (ids == expert)).sum(1, keepdim=True)
        assert expert or (both.abs() > 7).any()
    found = experts.apply(x, ids, shares, packed)
    assert (found - wanted).norm() < 2e-6 * wanted.norm()
    one = slice(3, 4)
    assert torch.equal(experts.apply(x[one], ids[one], shares[one], packed)[0], found[3])


ROUTINGS = (
    Routing(top_k=2),
    Routing(top_k=8, normalizes=True, scale=2.5),
    Routing(top_k=3, num_groups=4, top_groups=2),
    Routing(top_k=3, score="sigmoid", num_groups=4, top_groups=2, group_score="two largest", normalizes=True),
)


@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_experts_of_a_program(threads: Threads, routing: Routing, shared: str) -> None:
    """Router, experts and shared experts behind a norm, added to what was there; and the count of tokens."""
    tokens, num_experts, width, inner = 9, 8, 64, 48
    table, norm = random(tokens, width, seed=0), random(width, seed=1).abs() + 0.5
    router, bias = random(num_experts, width, seed=2), random(num_experts, seed=3) / 4
    gate_up, down = (
        random(num_experts, 2 * inner, width, seed=4) / 8,
        random(num_experts, width, inner, seed=5) / 8,
    )
    dense = random(2 * 40, width, seed=6) / 8, random(width, 40, seed=7) / 8, random(1, width, seed=8) / 8
    packed = CpuExperts(CpuOps(torch.float32, threads)).pack(gate_up, down)
    counts = torch.zeros(num_experts, dtype=torch.int32)

    def linear(weight: Tensor) -> LinearSpec:
        return LinearSpec(pack(threads, weight), None, weight.shape[1], weight.shape[0], None)

    has_bias = routing.score == "sigmoid"
    spec = ExpertsSpec(
        router=linear(router),
        correction_bias=bias if has_bias else None,
        routing=routing,
        packed=packed,
        shared=None if shared == "none" else DenseSpec(linear(dense[0]), "silu", linear(dense[1])),
        shared_gate=linear(dense[2]) if shared == "gated" else None,
        counts=lambda: counts,
    )
    program = Program(threads)
    x = program.buffer(width)
    program.embed(table, 1.0, x)

    def multiply(source: Buffer, linear: LinearSpec, out: Buffer, then: Then) -> None:
        matrix = linear.packed
        assert isinstance(matrix, Matrix)
        inputs = program.buffer_for(matrix)
        program.prepare(source, inputs)
        program.linear(inputs, matrix, linear.bias, out, then)

    phases = ExpertPhases(program, width)
    phases.add(spec, x, NormSpec(norm, 1e-6), x, multiply, adds=True)
    program.output(x)
    phases.count()

    def run(ids: list[int]) -> Tensor:
        given, out = torch.tensor(ids), torch.empty(len(ids), width)
        program.run(Step(num_tokens=len(ids), token_ids=given.data_ptr(), output=out.data_ptr()))
        return out

    found = run(list(range(tokens)))
    normed = table / (table.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm
    ids, shares = route(normed @ router.T, bias if has_bias else None, routing)
    wanted = table + mixed(normed, ids, shares, gate_up, down)
    if shared != "none":
        gate, up = (normed @ dense[0].T).double().chunk(2, 1)
        weight = torch.sigmoid(normed @ dense[2].T) if shared == "gated" else torch.ones(tokens, 1)
        wanted += torch.nn.functional.silu(gate) * up @ dense[1].double().T * weight
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)
    assert counts.tolist() == torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    assert torch.equal(run([4])[0], found[4])


def test_what_the_kernels_do_not_compute_is_computed_one_by_one(threads: Threads) -> None:
    """In float32 results shall be exact, so 4-bit weights are computed by their definition."""
    experts = CpuExperts(CpuOps(torch.float32, threads))
    gate_up, down = weights_of("int4", 192, HIDDEN, 1), weights_of("int4", HIDDEN, 96, 2)
    assert isinstance(gate_up, Quantized) and isinstance(down, Quantized)
    packed = experts.pack_quantized(gate_up, down)
    assert isinstance(packed, list)
    x, (ids, shares) = random(6, HIDDEN, seed=6), routed(6, "all")
    wanted = mixed(x, ids, shares, *(dequantized(weight, torch.float32) for weight in (gate_up, down)))
    torch.testing.assert_close(experts.apply(x, ids, shares, packed).double(), wanted, atol=1e-4, rtol=1e-4)
