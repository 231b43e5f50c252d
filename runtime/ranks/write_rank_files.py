"""Writes what each rank reads of a checkpoint to files of its own (models/rank_files.py).

`python -m runtime.ranks.write_rank_files OUTPUT MAX_BYTES`, with StartRank as JSON on standard input: a
process of its own, because it imports torch. A model is built for one rank after the other, as that rank
builds it, and all that it reads is recorded. Memory: the weights of one rank, and one file.
"""

import shutil
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import msgspec
import torch
from msgspec import structs
from safetensors.torch import save_file
from torch import Tensor

from runtime.devices.attention_ranks import AttentionRanks
from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.progress import Progress
from runtime.devices.single_rank import SingleRank
from runtime.errors import ModelError, StartError
from runtime.layers.weight import Index, SourceTensor, TensorReader, Weight, named_weights
from runtime.messages.ranks import StartRank
from runtime.models.checkpoint import Checkpoint, TensorSlice
from runtime.models.config.registry import model_class
from runtime.models.file_tensor import index_parts
from runtime.models.loader import allocate, fill_from_files, resolve_dtype, take
from runtime.models.rank_files import Region, metadata
from runtime.ranks.weights_loader import read_model

# files of a model's folder that are not copied
WEIGHTS = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack")
MAX_COPIED = 1 << 28  # bytes of a file that is copied


class RankOf(SingleRank):
    """Stands for one rank of several while its model is built and filled: nothing is exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def attention_of(rank: int, start: StartRank) -> AttentionRanks | None:
    """As devices/torch_collectives.open_attention_ranks, of one rank that exchanges nothing."""
    layout = start.attention_layout
    if not layout.is_divided:
        return None

    def among(parts: list[range]) -> RankOf:
        own = next(part for part in parts if rank in part)
        return RankOf(own.index(rank), len(own))

    return AttentionRanks(
        layout,
        among(layout.head_ranks()),
        among(layout.part_ranks()),
        among(layout.group_ranks()),
        among(layout.peer_ranks()),
        has_own_head=start.has_group_heads,
    )


class Recorder:
    """A TensorReader that knows the smallest region with all that was read."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._ranges: list[tuple[int, int]] | None = None

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        return self._reader.get_shape()

    def get_dtype(self) -> str:
        """The dtype by safetensors' name."""
        return self._reader.get_dtype()

    def __getitem__(self, index: Index) -> Tensor:
        """Reads this part."""
        shape = tuple(self.get_shape())
        parts = index_parts(index, shape)
        found = [
            (part, part + 1) if isinstance(part, int) else part.indices(size)[:2]
            for part, size in zip(parts, shape, strict=True)
        ]
        before = self._ranges or found
        self._ranges = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(before, found, strict=True)]
        return self._reader[index]

    def region(self) -> tuple[Region, Tensor]:
        """What was read, as one region and its numbers; of a tensor that this rank does not need, none."""
        shape = tuple(self.get_shape())
        ranges = [(0, 0)] * len(shape) if self._ranges is None else self._ranges
        numbers = self._reader[tuple(slice(first, last) for first, last in ranges)]
        return Region(shape, tuple(first for first, _ in ranges)), numbers.contiguous()


class Writer:
    """Files of one rank, each of at most about `max_bytes`."""

    def __init__(self, output: Path, rank: int, num_ranks: int, max_bytes: int) -> None:
        self._output, self._rank, self._num_ranks, self._max_bytes = output, rank, num_ranks, max_bytes
        self._tensors: dict[str, Tensor] = {}
        self._regions: dict[str, Region] = {}
        self._num_files = self._num_bytes = 0

    def take(self, name: str, tensor: TensorSlice, weight: Weight, source: SourceTensor) -> None:
        """Lets the rank read its part of a tensor, and keeps it."""
        recorder = Recorder(tensor.reader)
        take(frozenset(), name, TensorSlice(tensor.name, tensor.file, recorder), weight, source)
        region, numbers = recorder.region()
        if self._tensors and self._num_bytes + numbers.nbytes > self._max_bytes:
            self.write()
        self._tensors[tensor.name], self._regions[tensor.name] = numbers.clone(), region
        self._num_bytes += numbers.nbytes

    def write(self) -> None:
        """Writes what was kept since the last file."""
        path = self._output / f"model-rank-{self._rank}-part-{self._num_files}.safetensors"
        save_file(self._tensors, path, metadata(self._regions, self._rank, self._num_ranks))
        self._num_files += 1
        self._num_bytes = 0
        self._tensors, self._regions = {}, {}


def write_rank_files(start: StartRank, output: Path, max_bytes: int, progress: Progress) -> None:
    """Writes the files of all ranks, and copies what else the folder has. Raises StartError for what cannot
    be written so."""
    source = Path(start.model_path)
    if not source.is_dir() or start.load_format == "dummy":
        raise ModelError(
            f"{source} is no folder with weights, which files for ranks can be made of; a GGUF file is "
            "mapped by all ranks as it is"
        )
    if start.moe_a2a_backend != "none":
        raise ModelError(
            "--moe-a2a-backend spreads experts in another way than files for ranks; leave it out"
        )
    if any(output.glob("model-rank-*")) or output.resolve() == source.resolve():
        raise ModelError(f"{output} has files for ranks already, or is the model's folder; name another one")
    output.mkdir(parents=True, exist_ok=True)
    config = read_model(start)
    dtype = resolve_dtype(start.dtype, config, (*FACTS.dtypes, *FACTS.other_dtypes))
    one = structs.replace(start, device="cpu", tp_size=1, pp_size=1, attention_groups=1, attention_parts=1)
    alone = open_device(one, 0, dtype)
    for rank in range(start.tp_size):
        device = replace(
            alone,
            collectives=RankOf(rank, start.tp_size),
            attention=attention_of(rank, start),
            ep_size=start.ep_size,
            replicates_dense=start.replicates_dense,
        )
        model = model_class(config)(device, dtype, config)
        checkpoint = Checkpoint(folder=source, load_format=start.load_format, reading=start.reading)
        allocate(model, config, checkpoint)
        targets = {(name, part): weight for name, weight in named_weights(model) for part in weight.sources}
        writer = Writer(output, rank, start.tp_size, max_bytes)
        with torch.inference_mode():
            fill_from_files(targets, model, config, checkpoint, progress, take=writer.take)
        writer.write()
        del model, targets
    _copy_rest(source, output)


def _copy_rest(source: Path, output: Path) -> None:
    """Configuration, tokenizer and templates."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        is_small = path.is_file() and path.stat().st_size <= MAX_COPIED
        if is_small and len(name.parts) <= 2 and not any(fnmatch(path.name, one) for one in WEIGHTS):
            (output / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, output / name)


def main(argv: list[str]) -> int:
    """Writes what the arguments and standard input say."""
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=StartRank)

    def progress(phase: str, done: int, total: int) -> None:
        if total and sys.stderr.isatty():
            print(f"\r{done / 1e9:.1f} of {total / 1e9:.1f} GB read ", end="", file=sys.stderr, flush=True)

    try:
        write_rank_files(start, Path(argv[1]), int(argv[2]), progress)
    except (StartError, OSError) as error:
        print(f"runtime shard: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
