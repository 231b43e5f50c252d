"""--load-format dummy: random weights in place of a checkpoint's, the same for any number of ranks."""

import math
from collections.abc import Callable
from zlib import crc32

import torch
from torch import Tensor

from runtime.deferred_torch import load_deferred
from runtime.devices.progress import Gauge, Progress
from runtime.layers.weight import Index, SourceTensor, Weight
from runtime.models.config.weight_files import stored_bytes

# random numbers of one tensor, which a larger one repeats: a model has hundreds of tensors, or tens of
# thousands where each expert has its own
MAX_RANDOM = 1 << 22
MAX_RANDOM_OF_EXPERT = 1 << 16


def fill_with_random(targets: dict[tuple[str, str], Weight], seed: int, progress: Progress) -> None:
    """Fills all parts of weights, by (weight name, part name), with uniform numbers in ±0.05; norm weights
    are 1. The numbers of a tensor follow from `seed` and its name, so that any split over ranks gives the
    same model."""
    load_deferred()  # torch.Generator
    sources = [weight.sources[part] for (_, part), weight in targets.items()]
    gauge = Gauge(progress, "weights", sum(stored_bytes(one.shape, one.dtypes[0]) for one in sources))
    for (name, part), weight in targets.items():
        source = weight.sources[part]
        if source.shard.size == 0 or weight.is_optional:  # on another rank; or checkpoints may lack it
            continue
        most = MAX_RANDOM_OF_EXPERT if ".experts" in name else MAX_RANDOM
        if source.load is not None:
            source.load(RandomTensor(source, _generator(seed, name, part), most))
        elif "norm" in name.split(".")[-2] and name.endswith(".weight"):
            weight.target(source).fill_(1)
        else:
            _fill(weight.target(source), source, _generator(seed, name, part), most)
        gauge.add(stored_bytes(source.shape, source.dtypes[0]))
    gauge.finish()


def _generator(seed: int, name: str, part: str) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(f"{seed} {name} {part}".encode()))


def _rows(shape: tuple[int, ...], most: int) -> int:
    """How many rows of a tensor have numbers of their own: to make 8 billion one by one would take
    minutes."""
    return min(shape[0], max(1, most // max(1, math.prod(shape[1:])))) if shape else 0


def _fill(target: Tensor, source: SourceTensor, generator: torch.Generator, most: int) -> None:
    """Random numbers; the rows of a large tensor repeat."""
    rows = _rows(source.shape, most)
    numbers: Tensor = torch.empty(rows, *source.shape[1:]).uniform_(-0.05, 0.05, generator=generator)
    shard = source.shard
    if rows == source.shape[0]:
        target.copy_(numbers.narrow(source.dim, shard.start, shard.size))
        return
    numbers = numbers.to(target.dtype).to(target.device)
    index = torch.arange(source.shape[0], device=target.device) % rows
    target.copy_(
        numbers.index_select(0, index[shard.range])
        if source.dim == 0
        else numbers.narrow(source.dim, shard.start, shard.size)[index]
    )


class RandomTensor:
    """A TensorReader of random numbers, whole on every rank; the rows of a large tensor repeat."""

    def __init__(self, source: SourceTensor, generator: torch.Generator, most: int) -> None:
        self.dtype, shape = source.dtypes[0], source.shape
        rows, make = _rows(shape, most), DUMMY_KINDS[source.dummy_kind]
        self.tensor = make((rows, *shape[1:]) if shape else shape, self.dtype, generator)
        if shape and rows < shape[0]:
            repeats = -(-shape[0] // rows)
            self.tensor = self.tensor.repeat(repeats, *(1 for _ in shape[1:]))[: shape[0]]

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        """The dtype by safetensors' name."""
        return self.dtype

    def __getitem__(self, index: Index) -> Tensor:
        return self.tensor[index]


INTEGERS = {"I32": torch.int32, "I8": torch.int8, "U8": torch.uint8}


def _random_weight(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> Tensor:
    if dtype in INTEGERS:
        kind = INTEGERS[dtype]
        octets = torch.randint(-128, 128, (*shape, kind.itemsize), dtype=torch.int8, generator=generator)
        return octets.flatten().view(kind).view(shape)
    values = torch.empty(shape).uniform_(-1, 1, generator=generator)
    return (values * 448).to(torch.float8_e4m3fn) if dtype == "F8_E4M3" else values * 0.05


# SourceTensor.dummy_kind -> (shape, dtype, generator) -> tensor; weights and scales together give weights of
# about
# ±0.05
def _random_codes(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


DUMMY_KINDS: dict[str, Callable[[tuple[int, ...], str, torch.Generator], Tensor]] = {
    "": _random_weight,
    "scale": lambda shape, dtype, generator: torch.empty(shape).uniform_(1e-4, 2e-4, generator=generator),
    "wide scale": lambda shape, dtype, generator: torch.empty(shape).uniform_(
        5e-3, 1e-2, generator=generator
    ),
    "one": lambda shape, dtype, generator: torch.ones(shape),
    "input scale": lambda shape, dtype, generator: torch.full(shape, 0.02),
    "codes": _random_codes,
    "exponents": lambda shape, dtype, generator: torch.full(shape, 120, dtype=torch.uint8),
    "zero": lambda shape, dtype, generator: torch.zeros(shape),
}
