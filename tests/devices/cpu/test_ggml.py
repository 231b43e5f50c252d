"""Weights of ggml's types on the kernels of every instruction set that this machine runs, against what the
types mean (layers/quantization/ggml.py)."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from runtime.devices.cpu.ggml import KINDS, CpuGgml
from runtime.devices.cpu.kernels import choice, library
from runtime.devices.cpu.matrices import Kind, Threads
from runtime.devices.cpu.moe import ExpertsCall
from runtime.devices.cpu.products import Products
from runtime.devices.packed import GgmlPart
from runtime.layers.quantization.ggml import dequantize_rows
from tests.devices.cpu.test_kernels import BUILT, PROMPTS, continued, random, same_alone
from tests.devices.drive import start
from tests.models.make import make_checkpoint
from tests.models.make_gguf import random_blocks, write_gguf
from tests.models.reference import Reference

ROWS = (1, 3, 8, 9, 130)  # fewer than a tile, a tile, a tile and a row, more than a panel
INPUTS = 512


@pytest.fixture(params=BUILT, ids=lambda level: level.name)
def threads(request: pytest.FixtureRequest) -> Threads:
    return Threads(library.Library(request.param), 2)


def part_of(name: str, outputs: int, seed: int, inputs: int = INPUTS) -> tuple[GgmlPart, Tensor]:
    """Random rows of a type in an order of their own, and what they mean in float64."""
    octets = torch.from_numpy(random_blocks(Type[name], (outputs, inputs), seed))
    order = torch.randperm(outputs, generator=torch.Generator().manual_seed(seed))
    return GgmlPart(name, octets, order, inputs), dequantize_rows(name, octets)[order].double()


def rounded_inputs(x: Tensor) -> Tensor:
    """Inputs as products read them: 8 bits in groups of 32."""
    grouped = x.unflatten(1, (-1, 32))
    steps = (grouped.abs().amax(2, keepdim=True) / 127).clamp(min=1e-12)
    return ((grouped / steps).round() * steps).flatten(1)


def check(threads: Threads, parts: list[tuple[GgmlPart, Tensor]]) -> None:
    """Products are exact but for float32's rounding for inputs of 8 bits, within 1.5 % for others, and a
    row's bits are the same alone."""
    matrix, products = CpuGgml(threads).pack([part for part, _ in parts]), Products(threads)
    full = torch.cat([numbers for _, numbers in parts])
    for count in ROWS:
        x = random(count, full.shape[1], seed=count)
        found = same_alone(products, x, matrix)
        wanted = rounded_inputs(x).double() @ full.T
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
        plain = x.double() @ full.T
        assert (found - plain).norm() < 0.015 * plain.norm()
    assert torch.equal(
        products.multiply(torch.zeros(2, full.shape[1]), matrix, None), torch.zeros(2, len(full))
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_type(threads: Threads, name: str) -> None:
    for outputs in (5, 96, 130):
        check(threads, [part_of(name, outputs, outputs)])


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0"])
def test_rows_of_an_odd_number_of_groups(threads: Threads, name: str) -> None:
    check(threads, [part_of(name, 40, 1, inputs=96)])


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_lost(threads: Threads, name: str) -> None:
    """Rows of the packed weight are the file's, bit by bit, whatever its bytes say."""
    size = gguf.GGML_QUANT_SIZES[Type[name]]
    octets = torch.randint(
        0, 256, (70, INPUTS // size[0] * size[1]), generator=torch.Generator().manual_seed(1)
    )
    octets = octets.to(torch.uint8)
    places = torch.tensor([0, 69, 31, 32])
    matrix = CpuGgml(threads).pack([GgmlPart(name, octets, torch.arange(70), INPUTS)])
    wanted = dequantize_rows(name, octets)[places]
    is_number = wanted.isfinite()
    found = matrix.rows(places)
    assert torch.equal(found[is_number], wanted[is_number]) and is_number.float().mean() > 0.5
    assert not found[~is_number].isfinite().any()


def test_parts_of_several_types(threads: Threads) -> None:
    """Queries and keys of one type, values of another, as mixed files have them."""
    names = (("Q4_K", 64), ("Q4_K", 32), ("Q6_K", 32), ("Q8_0", 50))
    check(threads, [part_of(name, outputs, i) for i, (name, outputs) in enumerate(names)])
    ggml = CpuGgml(threads)
    assert ggml.computes(list(names), torch.bfloat16) and not ggml.computes(list(names), torch.float32)
    assert not ggml.computes([("Q4_K", 50), ("Q4_K", 64)], torch.bfloat16)
    assert not ggml.computes([("IQ4_NL", 64)], torch.bfloat16)


TYPES = {"token_embd.weight": Type.Q6_K, "output.weight": Type.Q6_K}


def mixed(name: str) -> Type:
    """As llama.cpp's Q4_K_M: values and the way down in more bits."""
    return TYPES.get(name, Type.Q6_K if "attn_v" in name or "ffn_down" in name else Type.Q4_K)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen2_moe", "qwen3_moe"])
def test_a_mixed_file_by_kernels(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities of the tokens that the program chose are those of transformers with the numbers of
    the file, but for bfloat16 and inputs of 8 bits (0.05 to 0.09 for these random weights); so are those of
    the layers in torch, which dequantize."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    sizes |= {"head_dim": 64} if family == "gemma2" else {}
    sizes |= {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256} if "moe" in family else {}
    folder = make_checkpoint(family, tmp_path / "hf", **sizes)
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, family, mixed).save_pretrained(tmp_path / "read")
    reference = Reference(tmp_path / "read")
    for level in ("none", BUILT[0].name):
        answers, chances, by_program = continued(path, level, monkeypatch, dtype="bfloat16")
        assert by_program == (level != "none")
        errors = []
        for prompt, tokens, found in zip(PROMPTS, answers, chances, strict=True):
            rows = reference.logprobs(prompt + tokens)[len(prompt) - 1 : -1]
            errors += [float(row[token]) - one for row, token, one in zip(rows, tokens, found, strict=False)]
        squares = torch.tensor(errors).square().sort().values
        if "moe" in family:  # a router's near tie may go to another expert
            squares = squares[: len(squares) * 9 // 10]
        assert squares.mean().sqrt() < 0.15


@pytest.mark.parametrize(
    ("first", "second"), [("Q4_K", "Q6_K"), ("Q5_K", "Q5_K"), ("Q4_0", "Q8_0"), ("Q5_0", "Q4_0")]
)
def test_experts_of_a_type(threads: Threads, first: str, second: str) -> None:
    """As exact as products of single weights, and a token's bits are the same alone. The halves of the first
    product are no whole blocks of outputs where the type of the second allows that."""
    count, inner, hidden = 4, 256 if second.endswith("K") else 96 - 32 * (threads.library.outputs == 16), 256
    made = [[part_of(first, inner, i, hidden), part_of(first, inner, 9 + i, hidden)] for i in range(count)]
    downs = [part_of(second, hidden, 20 + i, inner) for i in range(count)]
    stack = CpuGgml(threads).pack_experts(
        [[part for part, _ in pair] for pair in made], [part for part, _ in downs]
    )
    full = [torch.stack([torch.cat([numbers for _, numbers in pair]) for pair in made])]
    full.append(torch.stack([numbers for _, numbers in downs]))
    x, seeded = random(40, hidden, seed=2), torch.Generator().manual_seed(3)
    ids = torch.rand(40, count, generator=seeded).argsort(1)[:, :2]
    shares = torch.rand(40, 2, generator=seeded)
    call = ExpertsCall(threads)
    found = call.apply(x, ids, shares, stack)
    wanted = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(count):
        gate, up = (rounded_inputs(x).double() @ full[0][expert].T).chunk(2, 1)
        between = rounded_inputs((torch.nn.functional.silu(gate) * up).float()).double()
        wanted += between @ full[1][expert].T * (shares * (ids == expert)).sum(1, keepdim=True)
    assert (found - wanted).norm() < 2e-3 * wanted.norm()  # a code between two may be either
    for row in (0, 17, 39):
        one = slice(row, row + 1)
        assert torch.equal(call.apply(x[one], ids[one], shares[one], stack)[0], found[row])


def test_experts_of_a_file_stay_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And take the memory of their codes; in float32 they are dequantized."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    folder, path = make_checkpoint("qwen3_moe", tmp_path / "hf", **sizes), tmp_path / "model.gguf"
    write_gguf(folder, path, "qwen3_moe", mixed)
    monkeypatch.setenv(choice.VARIABLE, BUILT[0].name)
    found = []
    for dtype in ("bfloat16", "float32"):
        executor, ready = start(path, dtype=dtype)
        packed = executor.runner.model.layers[0].mlp.packed  # type: ignore[attr-defined]
        found.append((packed.gate_up[0].kind, packed.down[0].kind, packed.num_bytes))
    weights = 3 * 256 * 256 * len(packed.gate_up)
    assert found[1] == (Kind.FLOAT32, Kind.FLOAT32, 4 * weights)
    assert found[0][:2] == (Kind.Q4_K, Kind.Q6_K) and found[0][2] < weights * 6.5 / 8


def test_a_float_weight_is_rounded_to_8_bits(threads: Threads) -> None:
    """To the nearest code of 32 inputs, whose scale float16 rounds; groups of zeros stay zeros."""
    weight = random(70, 96, seed=7)
    weight[3, 32:64] = 0
    matrix = CpuGgml(threads).quantized(weight.bfloat16())
    found = matrix.rows(torch.arange(70))
    steps = weight.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True) / 127
    error = (found - weight.bfloat16().float()).unflatten(1, (-1, 32)).abs()
    assert (error <= steps * 0.57).all() and error.max() > 0  # half a step, and bfloat16's of the largest
    x = random(9, 96, seed=8)
    wanted = rounded_inputs(x).double() @ found.double().T
    assert (same_alone(Products(threads), x, matrix) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_heads_have_8_bits_where_all_else_is_quantized_while_loading(
    quantization: str, tmp_path: Path
) -> None:
    """And in float32 they are computed in full."""
    folder = make_checkpoint(
        "llama", tmp_path, hidden_size=128, intermediate_size=192, tie_word_embeddings=True
    )
    kinds = []
    for dtype in ("bfloat16", "float32"):
        executor, _ = start(folder, dtype=dtype, quantization=quantization)
        model = executor.runner.model  # type: ignore[attr-defined]
        assert model.embed_tokens.packed is model.lm_head.packed
        kinds.append(model.lm_head.packed.kind)
    assert kinds == [Kind.Q8_0, Kind.FLOAT32]
