"""A look at the kernels before a rank uses them: small products of every kind of weight, against float64.

A level that a processor names may still be one that this machine does not run: a hypervisor or a sandbox
takes instructions away, or a processor or a build is wrong. Inputs are integers that every form of inputs has
exactly, so a product differs from its definition by the rounding of float32 alone. The check takes about
10 ms.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import prod
from random import Random

import torch
from torch import Tensor

from runtime import log
from runtime.devices.base import Quantized
from runtime.devices.cpu.ggml import pack_part
from runtime.devices.cpu.kernels.choice import usable_levels
from runtime.devices.cpu.kernels.levels import Level
from runtime.devices.cpu.kernels.library import Library, Step
from runtime.devices.cpu.matrices import Matrix, Threads, pack, pack_mxfp4, pack_quantized
from runtime.devices.cpu.products import Products
from runtime.devices.packed import GgmlPart
from runtime.layers.quantization.dequantize import dequantized
from runtime.layers.quantization.ggml import MXFP4_TABLE, dequantize_rows
from runtime.layers.quantization.module_shard import pack_codes
from runtime.models.config.gguf.types import BY_NAME
from runtime.models.config.quantization_schemes import Fp8, Int8, PackedInt

OUTPUTS, INPUTS, GROUP = 70, 256, 32  # more than a block of outputs, and a part of one
ROWS = (1, 37)  # one row, and more than two tiles of AMX
TOLERANCE = 1e-5  # of the largest result
# bytes of the float16 scales of a block: random bytes would be infinities among them
HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


class Refused(Exception):
    """The processor does not run an instruction of the level."""


def load_library() -> Library | None:
    """The kernels for this machine: the best level that computes what it should. None: torch computes. One
    line in the log for each level that is left out. Raises StartError (see choice.usable_levels)."""
    return next((library for level in usable_levels() if (library := _checked(level)) is not None), None)


@cache
def _checked(level: Level) -> Library | None:
    try:
        library = Library(level)
        problem = find_problem(library)
    except (OSError, AttributeError) as error:
        problem = f"it cannot be loaded: {error}"
    except Refused:
        problem = "the processor refuses its instructions"
    if not problem:
        return library
    log.get("start").warning("a level of the CPU kernels is left out", kernels=level.name, problem=problem)
    return None


def find_problem(library: Library) -> str:
    """Which products are wrong; empty: none. Raises Refused."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its matrices are too small to be shared out
    try:
        wrong = _wrong_kinds(library)
    finally:
        torch.set_num_threads(num_threads)
    return f"wrong products of {', '.join(wrong)}" if wrong else ""


def _wrong_kinds(library: Library) -> list[str]:
    threads = Threads(library, 1)
    products, random = Products(threads), Random(0)
    rows = (random_octets(random, max(ROWS), INPUTS) % 253).float() - 126
    rows[:, ::GROUP] = 127  # so the scale of 8-bit inputs is 1
    wrong = []
    for matrix, weight in matrices_of_all_kinds(threads, random):
        wanted = rows.double() @ weight.double().T
        found = [_multiply(products, rows[:count], matrix) for count in ROWS]
        most = TOLERANCE * wanted.abs().max()
        if not all((mine - wanted[: len(mine)]).abs().max() <= most for mine in found):
            wrong.append(matrix.kind.name)
    return wrong


def _multiply(products: Products, rows: Tensor, matrix: Matrix) -> Tensor:
    out = torch.empty(len(rows), matrix.outputs)
    step = Step(num_tokens=len(rows), input=rows.data_ptr(), output=out.data_ptr())
    arguments = (products.threads.handle, products.handle, matrix.handle, ctypes.addressof(step))
    if products.functions.kernels_try_multiply(*arguments):
        raise Refused
    return out


def random_octets(random: Random, *shape: int) -> Tensor:
    """Random bytes as uint8. A torch.Generator would need what deferred_torch leaves out."""
    return torch.frombuffer(bytearray(random.randbytes(prod(shape))), dtype=torch.uint8).view(shape)


def matrices_of_all_kinds(threads: Threads, random: Random) -> Iterator[tuple[Matrix, Tensor]]:
    """A packed matrix of each kind, and the weight [outputs, inputs] that it stands for."""
    octets = partial(random_octets, random)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = (octets(OUTPUTS, INPUTS) / 64 + octets(OUTPUTS, INPUTS) / 8192 - 2).to(dtype)
        yield pack(threads, weight), weight
    for quantized in _quantized(octets):
        yield pack_quantized(threads, quantized), dequantized(quantized, torch.float32)
    exponents = octets(OUTPUTS, INPUTS // GROUP) % 8 + 120
    codes = octets(OUTPUTS, INPUTS // 2)
    pairs = torch.stack((codes & 15, codes >> 4), 2).flatten(1).long()
    scales = torch.exp2(exponents.float() - 128).repeat_interleave(GROUP, 1)
    yield pack_mxfp4(threads, codes, exponents), MXFP4_TABLE[pairs] * scales
    for name, places in HALVES.items():
        kind = BY_NAME[name]
        blocks = octets(OUTPUTS, INPUTS // kind.block, kind.num_bytes)
        for place in places:
            blocks[..., place : place + 2] = torch.tensor([0.25]).half().view(torch.uint8)
        rows = blocks.flatten(1)
        part = GgmlPart(name, rows, torch.arange(OUTPUTS), INPUTS)
        yield pack_part(threads, part), dequantize_rows(name, rows)


def _quantized(octets: Callable[..., Tensor]) -> Iterator[Quantized]:
    """A weight of each scheme."""
    groups = INPUTS // GROUP
    scale = octets(OUTPUTS, groups).float() / 256 + 0.5
    codes, zeros = octets(OUTPUTS, INPUTS) & 15, octets(OUTPUTS, groups) & 15
    yield Quantized(Int8(), (codes.to(torch.int8) - 8) * 15, scale[:, :1])
    half = PackedInt(4, GROUP, has_zero_points=False, has_half_scales=True)
    yield Quantized(half, pack_codes(codes, 4), scale.half().float(), None)
    yield Quantized(PackedInt(4, GROUP, has_zero_points=True), pack_codes(codes, 4), scale, zeros)
    floats = (octets(OUTPUTS, INPUTS) & 0xBF).view(torch.float8_e4m3fn)  # none that is no number
    yield Quantized(Fp8(0, "none"), floats, scale[:, :1])
    yield Quantized(Fp8(GROUP, "none"), floats, scale)
