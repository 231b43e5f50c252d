"""--load-format sharded_state: what each rank reads of a checkpoint, in files of its own.

    model-rank-R-part-P.safetensors   tensors under the names of the Hugging Face layout, of each the region
                                      that rank R needs; the metadata has the regions and the number of ranks

A rank reads its files from front to back, whatever the layout of the original is. `runtime shard`
writes them.
"""

from pathlib import Path

import msgspec
from msgspec import Struct
from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.weight import Index
from runtime.models.config.weight_files import SHARD_FILE
from runtime.models.file_tensor import FileTensor, Parts, index_parts

FORMAT = "runtime-shards-1"
AGAIN = "write them again with `runtime shard`"


class Region(Struct, frozen=True, array_like=True):
    """A part of a tensor: `begins` of each dimension, in a tensor of `shape`."""

    shape: tuple[int, ...]
    begins: tuple[int, ...]


def rank_files(paths: list[Path], rank: int) -> list[Path]:
    """The files of one rank, in order. Raises ModelError where one is missing."""
    parts = {
        int(found[2]): path
        for path in paths
        if (found := SHARD_FILE.fullmatch(path.name)) and int(found[1]) == rank
    }
    if not parts or sorted(parts) != list(range(len(parts))):
        raise ModelError(
            f"the files model-rank-{rank}-part-*.safetensors are not complete; {AGAIN} for as many ranks as "
            "are started"
        )
    return [parts[part] for part in sorted(parts)]


def metadata(regions: dict[str, Region], rank: int, num_ranks: int) -> dict[str, str]:
    """The metadata of a file."""
    return {
        "format": FORMAT,
        "rank": str(rank),
        "num_ranks": str(num_ranks),
        "regions": msgspec.json.encode(regions).decode(),
    }


def stored_regions(path: Path, found: dict[str, str], rank: int, num_ranks: int) -> dict[str, Region]:
    """The regions of a file's tensors. Raises ModelError for a file of another program, rank or number of
    ranks."""
    if found.get("format") != FORMAT:
        raise ModelError(f"{path.name} was not written by `runtime shard`; {AGAIN}")
    if (found.get("rank"), found.get("num_ranks")) != (str(rank), str(num_ranks)):
        raise ModelError(
            f"{path.name} is for rank {found.get('rank')} of {found.get('num_ranks')}, and this is rank "
            f"{rank} of {num_ranks}; start as many ranks (--tp-size) as it was written for, or {AGAIN}"
        )
    try:
        return msgspec.json.decode(found.get("regions", ""), type=dict[str, Region])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path.name} has regions that cannot be read ({error}); {AGAIN}") from None


class ShardTensor:
    """A TensorReader of a tensor of which a file has a region."""

    def __init__(self, stored: FileTensor, region: Region | None, where: str) -> None:
        """`where`: the tensor's name and file, for errors. Raises ModelError."""
        dimensions = len(stored.get_shape())
        if region is None or not dimensions == len(region.shape) == len(region.begins):
            raise ModelError(f"{where} has no region, or one of other dimensions; {AGAIN}")
        self._stored, self._region, self._where = stored, region, where

    def get_shape(self) -> list[int]:
        """The shape of the tensor in the original checkpoint."""
        return list(self._region.shape)

    def get_dtype(self) -> str:
        """The dtype by safetensors' name."""
        return self._stored.get_dtype()

    def __getitem__(self, index: Index) -> Tensor:
        """Reads this part. Raises ModelError where the file does not have all of it."""
        return self._stored[self._within(index)]

    def copy_to(self, target: Tensor, index: Index) -> None:
        """See FileTensor. Raises ModelError as above."""
        self._stored.copy_to(target, self._within(index))

    def _within(self, index: Index) -> Parts:
        found: list[slice | int] = []
        parts = index_parts(index, self._region.shape)
        sizes = self._stored.get_shape()
        for part, full, begin, size in zip(
            parts, self._region.shape, self._region.begins, sizes, strict=True
        ):
            first, last = (part, part + 1) if isinstance(part, int) else part.indices(full)[:2]
            if first < last and not begin <= first < last <= begin + size:
                raise ModelError(
                    f"{self._where} lacks what this rank reads of it; start with the parallel options that "
                    f"it was written with, or {AGAIN}"
                )
            first = max(first, begin)
            found.append(
                part - begin if isinstance(part, int) else slice(first - begin, max(first, last) - begin)
            )
        return tuple(found)
