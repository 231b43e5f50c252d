"""The kernels of every instruction set that this machine runs, against float64 and against the layers in
torch."""

import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.devices.cpu import quantized, self_check
from runtime.devices.cpu.kernels import choice, library
from runtime.devices.cpu.kernels.levels import LEVELS, Level, capable_levels, supported_levels
from runtime.devices.cpu.matrices import Matrix, Threads, can_pack, pack, pack_mxfp4, pack_quantized
from runtime.devices.cpu.products import Products
from runtime.layers.quantization.dequantize import dequantized
from runtime.layers.quantization.module_shard import pack_codes
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make import VOCAB_SIZE, make_checkpoint

BUILT = [level for level in supported_levels() if level.path.is_file()]
SHAPES = ((33, 17), (96, 64), (130, 200))  # outputs and inputs
ROWS = (1, 3, 13, 130)  # fewer than a tile, a tile and a row, more than a panel
PROMPTS = [
    np.random.default_rng(i).integers(0, VOCAB_SIZE, size).tolist() for i, size in enumerate((5, 90, 33))
]


def test_the_suite_has_kernels() -> None:
    """Without them all tests of the cpu device would be tests of torch alone."""
    assert BUILT or not supported_levels()


@pytest.fixture(params=BUILT, ids=lambda level: level.name)
def threads(request: pytest.FixtureRequest) -> Threads:
    level: Level = request.param
    return Threads(library.Library(level), 2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_alone(products: Products, x: Tensor, matrix: Matrix) -> Tensor:
    """The product, after a look whether each row has the same bits alone."""
    found = products.multiply(x, matrix, None)
    for row in (0, len(x) // 2, len(x) - 1):
        assert torch.equal(products.multiply(x[row : row + 1], matrix, None)[0], found[row])
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_of_floats(threads: Threads, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """bfloat16 weights may meet inputs that are rounded to bfloat16; else inputs stay what they are."""
    products, weight = Products(threads), random(*shape).to(dtype)
    matrix = pack(threads, weight)
    for count in ROWS:
        x = random(count, shape[1], seed=1)
        rounds = dtype == torch.bfloat16 and threads.functions.kernels_input_form(matrix.kind) == 1
        wanted = (x.to(dtype) if rounds else x).double() @ weight.double().T
        found = same_alone(products, x, matrix)
        assert (found - wanted).abs().max() < 2e-6 * wanted.abs().max() * shape[1] ** 0.5


def test_rows_of_a_packed_weight(threads: Threads) -> None:
    places = torch.tensor([0, 129, 31, 64])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = random(130, 200).to(dtype)
        assert torch.equal(pack(threads, weight).rows(places), weight[places].float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_is_what_its_scheme_says(threads: Threads, shape: tuple[int, int]) -> None:
    """Sums of integers are exact, so the definition gives the same bits."""
    codes = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    weight = Quantized(Int8(), codes, random(shape[0], 1, seed=2).abs() + 0.01)
    matrix, products = pack_quantized(threads, weight), Products(threads)
    for count in ROWS:
        x = random(count, shape[1], seed=count)
        assert torch.equal(same_alone(products, x, matrix), quantized.multiply(x, weight, None))
    zero = torch.zeros(2, shape[1])
    assert torch.equal(products.multiply(zero, matrix, None), torch.zeros(2, shape[0]))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("has_zeros", "is_half"), [(False, False), (True, False), (False, True)])
def test_int4_meets_inputs_of_8_bits(threads: Threads, group: int, has_zeros: bool, is_half: bool) -> None:
    """Exact for inputs that were quantized in groups of 32; within 1.5 % of the result for the
    others."""
    outputs, inputs = 70, 256
    seeded = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (outputs, inputs), generator=seeded, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (outputs, inputs // group), generator=seeded, dtype=torch.uint8)
    scale = random(outputs, inputs // group, seed=5)
    scale = scale.half().float() if is_half else scale
    scheme = PackedInt(4, group, has_zero_points=has_zeros, has_half_scales=is_half)
    weight = Quantized(scheme, pack_codes(codes, 4), scale, zeros if has_zeros else None)
    assert can_pack(weight, torch.bfloat16) and not can_pack(weight, torch.float32)
    matrix, products, full = (
        pack_quantized(threads, weight),
        Products(threads),
        dequantized(weight, torch.float32),
    )
    for count in ROWS:
        x = random(count, inputs, seed=count)
        grouped = x.unflatten(1, (-1, 32))
        steps = grouped.abs().amax(2, keepdim=True) / 127
        rounded = ((grouped / steps).round() * steps).flatten(1)
        found = same_alone(products, x, matrix)
        wanted = rounded.double() @ full.double().T
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
        plain = x.double() @ full.double().T
        assert (found - plain).norm() < 0.015 * plain.norm()


def float8_weight(outputs: int, inputs: int, group: int) -> Quantized:
    """All 254 numbers, small ones among them."""
    seeded = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 127, (outputs, inputs), generator=seeded, dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, generator=seeded, dtype=torch.uint8) << 7
    scale = random(outputs, -(-inputs // group) if group else 1, seed=8).abs() + 0.01
    return Quantized(Fp8(group, "none"), codes.view(torch.float8_e4m3fn), scale)


@pytest.mark.parametrize(("inputs", "group"), [(200, 0), (96, 16), (256, 128), (192, 128), (130, 64)])
def test_products_of_8_bit_floats(threads: Threads, inputs: int, group: int) -> None:
    """Weights are exact, and so are products with inputs that bfloat16 has."""
    weight, products = float8_weight(70, inputs, group), Products(threads)
    assert can_pack(weight, torch.bfloat16) and not can_pack(weight, torch.float32)
    matrix, full = pack_quantized(threads, weight), dequantized(weight, torch.float32)
    for count in ROWS:
        x = random(count, inputs, seed=count).bfloat16().float()
        wanted = x.double() @ full.double().T
        assert (same_alone(products, x, matrix) - wanted).abs().max() < 3e-6 * wanted.abs().max()
    one = torch.eye(inputs)  # each weight by itself, but for its scale
    assert torch.equal(products.multiply(one, matrix, None), full.T)


def test_products_of_microscaled_floats(threads: Threads) -> None:
    """Numbers of 4 bits with powers of two as scales: exact, in products with inputs that bfloat16 has."""
    outputs, inputs, products = 70, 96, Products(threads)
    seeded = torch.Generator().manual_seed(9)
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=seeded, dtype=torch.uint8)
    exponents = torch.randint(115, 131, (outputs, inputs // 32), generator=seeded, dtype=torch.uint8)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    pairs = torch.stack((codes & 15, codes >> 4), 2).flatten(1).long()
    full = numbers[pairs] * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    matrix = pack_mxfp4(threads, codes, exponents)
    assert (
        matrix.num_bytes == -(-outputs // threads.library.outputs) * threads.library.outputs * 128 * 17 // 32
    )
    for count in ROWS:
        x = random(count, inputs, seed=count).bfloat16().float()
        wanted = x.double() @ full.double().T
        assert (same_alone(products, x, matrix) - wanted).abs().max() < 3e-6 * wanted.abs().max()
    assert torch.equal(products.multiply(torch.eye(inputs), matrix, None), full.T)


def test_a_row_has_the_same_bits_in_any_company(threads: Threads) -> None:
    """Of every kind of weight: alone, with few rows, and with many."""
    products, x = Products(threads), random(33, self_check.INPUTS, seed=3)
    for matrix, _ in self_check.matrices_of_all_kinds(threads, Random(1)):
        whole = products.multiply(x, matrix, None)
        for count in (1, 2, 5, 8):
            for first in (0, 3, 33 - count):
                rows = slice(first, first + count)
                assert torch.equal(products.multiply(x[rows], matrix, None), whole[rows]), matrix.kind


def test_every_chunk_is_computed_once() -> None:
    """With more threads than CPUs, which lose their turns in the middle of it: sums of memory, often."""
    if not BUILT:
        pytest.skip("this machine runs no kernels")
    functions = library.Library(BUILT[0]).functions
    team, memory = functions.kernels_start(9), torch.ones(16 << 18, dtype=torch.int32)
    for pieces in (1, 2, 7, 16) * 40:
        assert functions.kernels_read(team, memory.data_ptr(), pieces << 20) == pieces << 18
    functions.kernels_stop(team)


def continued(
    folder: Path, level: str, patch: pytest.MonkeyPatch, **options: object
) -> tuple[list[list[int]], list[list[float]], bool]:
    """Greedy continuations of the prompts in company and their log probabilities, and whether a program
    computed them. Prompts are cut in chunks of 24 tokens, which go with the decodes of the prompts before."""
    patch.setenv(choice.VARIABLE, level)
    executor, ready = start(folder, **options)
    planner = Planner(executor, ready, 4)
    rows = [planner.row(i, prompt, sampling(top_logprobs=0)) for i, prompt in enumerate(PROMPTS)]
    decodes: list[Row] = []
    for row in rows:
        while row.computed < row.prompt_len:
            planner.run(decodes, [(row, min(24, row.prompt_len - row.computed))])
        decodes.append(row)
    for _ in range(8):
        planner.run(rows, [])
    used = executor.runner.forward.program is not None  # type: ignore[attr-defined]
    chances = [[chance for _, chance, *_ in row.results] for row in rows]
    return [row.tokens[row.prompt_len :] for row in rows], chances, used


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "gemma2", "mistral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
)
@pytest.mark.parametrize("level", [level.name for level in BUILT])
def test_a_whole_decoder_is_its_layers(
    level: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, norms of heads, caps, windows and gelu, each at its family; tests/models compares the best
    level with transformers."""
    folder = make_checkpoint(family, tmp_path)
    by_layers = continued(folder, "none", monkeypatch, dtype="float32")
    by_program = continued(folder, level, monkeypatch, dtype="float32")
    assert by_program[2] and not by_layers[2]
    assert by_program[0] == by_layers[0]
    for mine, other in zip(by_program[1], by_layers[1], strict=True):
        assert mine == pytest.approx(other, abs=2e-4)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_a_decoder_with_pages_of_8_bits(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels write the codes that torch writes, and read them as torch does."""
    folder = make_checkpoint("llama", tmp_path, head_dim=20)
    by_layers = continued(folder, "none", monkeypatch, dtype="float32", kv_dtype=kv_dtype)
    by_program = continued(folder, BUILT[0].name, monkeypatch, dtype="float32", kv_dtype=kv_dtype)
    assert by_program[2] and not by_layers[2]
    for mine, other in zip(by_program[1], by_layers[1], strict=True):
        assert mine[0] == pytest.approx(other[0], abs=5e-3)


@pytest.mark.parametrize(
    ("quantization", "dtype", "most"), [("int8", "float32", 0.02), ("int4", "bfloat16", 0.2)]
)
def test_a_decoder_that_is_quantized_while_it_is_loaded(
    quantization: str, dtype: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kernels and by the definition of its scheme. Sums of norms differ in their last bits, and with them
    the code of an activation that lies between two; 4-bit weights meet inputs that are rounded
    otherwise."""
    folder = make_checkpoint("llama", tmp_path, hidden_size=128, intermediate_size=192)
    by_layers = continued(folder, "none", monkeypatch, dtype=dtype, quantization=quantization)
    by_program = continued(folder, BUILT[0].name, monkeypatch, dtype=dtype, quantization=quantization)
    assert by_program[2] and not by_layers[2]
    for mine, other in zip(by_program[1], by_layers[1], strict=True):
        assert mine[0] == pytest.approx(other[0], abs=most)


def test_levels_are_chosen_by_what_the_processor_names() -> None:
    every = frozenset().union(*(level.flags for level in LEVELS))
    names = [level.name for level in supported_levels("x86_64", every, "AuthenticAMD")]
    assert [name for name in names if name != "amx"] == ["avx512_bf16", "avx512_vnni", "avx2"]
    assert names.index("avx512_bf16") == names.count("amx"), "tiles are of processes that were given them"
    known = every - {"avx512_bf16"}
    assert [level.name for level in supported_levels("x86_64", known)] == ["avx512_vnni", "avx2"]
    assert supported_levels("x86_64", frozenset({"avx2"})) == ()
    assert supported_levels("aarch64", frozenset({"asimd"}))[-1].name == "neon"


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD", ""])
def test_dot_products_of_bfloat16_that_are_slower_than_float32(vendor: str) -> None:
    """On Intel's processors, where AMX is for bfloat16."""
    every = frozenset().union(*(level.flags for level in LEVELS))
    names = [level.name for level in capable_levels("x86_64", every, vendor)]
    fast = ["avx512_vnni", "avx512_bf16"] if vendor == "GenuineIntel" else ["avx512_bf16", "avx512_vnni"]
    assert names == ["amx", *fast, "avx2"]


def test_a_rank_imports_no_compiler_of_torch() -> None:
    """It takes 70 MB and a second, which a rank without --enable-torch-compile has no use for."""
    code = "import sys, runtime.ranks.worker, runtime.ranks.torch_executor, runtime.devices.cpu.device as _; "
    code += "print([name for name in sys.modules if name.startswith('torch._dynamo')])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
