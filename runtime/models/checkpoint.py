"""A model's checkpoint: which tensors its files have, and slices of them without reading the rest."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.quantization.ggml_joined import JoinedRows, num_bytes
from runtime.layers.quantization.ggml_rows import GgmlRows, mapped_octets
from runtime.layers.weight import TensorReader
from runtime.messages.ranks import Reading
from runtime.models.config.dense_modules import DenseModule
from runtime.models.config.gguf.container import read_gguf
from runtime.models.config.gguf.tensors import sources
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.weight_files import StoredAs, stored_as, stored_bytes, twice, weight_files
from runtime.models.file_tensor import open_safetensors
from runtime.models.mistral_names import mistral_tensor
from runtime.models.numpy_cache import cached_tensors
from runtime.models.rank_files import ShardTensor, rank_files, stored_regions
from runtime.models.torch_files import LoadedTensor, torch_tensors


class TensorSlice:
    """A tensor in an open file. `reader` reads when it is indexed; one with `copy_to` reads straight to where
    its numbers are needed."""

    def __init__(self, name: str, file: str, reader: TensorReader, num_bytes: int | None = None) -> None:
        """`num_bytes`: those in the file, where they do not follow from shape and dtype."""
        self.name = name
        self.file = file
        self.reader = reader
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        if self._num_bytes is not None:
            return self._num_bytes
        return stored_bytes(self.reader.get_shape(), self.reader.get_dtype())


Function = Callable[[Path], Iterable[tuple[str, Tensor]]]


class Checkpoint(Struct, frozen=True, kw_only=True):
    """Where a rank's weights come from, and how they are read."""

    folder: Path  # of the model, or a GGUF file
    load_format: str = "auto"  # --load-format
    reading: Reading = Reading()
    rank: int = 0
    num_ranks: int = 1
    function: Function | None = None  # of --custom-weight-loader, which reads in place of this module

    @property
    def is_random(self) -> bool:
        """Whether weights are made up and no file is read."""
        return self.load_format == "dummy"

    @property
    def stored_as(self) -> StoredAs:
        """What kind of files has the weights, unless they are random."""
        return stored_as(self.folder, self.load_format)

    def files(self) -> list[Path]:
        """The files that this rank reads. Raises ModelError where one is missing."""
        if self.function is not None:
            return []
        paths = weight_files(self.folder, self.load_format)
        return rank_files(paths, self.rank) if self.stored_as == "sharded_state" else paths

    def tensors(self, config: ModelConfig) -> Iterator[TensorSlice]:
        """All tensors under their names in the Hugging Face layout, each valid until the next is requested.
        Raises ModelError for a damaged file and for a name that occurs twice."""
        kind = self.stored_as
        if self.function is not None:
            for name, tensor in self.function(self.folder):
                yield TensorSlice(name, self.load_format, LoadedTensor(tensor))
            return
        if kind == "gguf":
            yield from gguf_tensors(self.folder)
            return
        seen: dict[str, str] = {}
        for tensor in self._stored_tensors(kind, self.files(), config):
            if tensor.name in seen:
                raise ModelError(twice(tensor.name, seen[tensor.name], tensor.file))
            seen[tensor.name] = tensor.file
            yield tensor
        if kind != "sharded_state" and config.pooling is not None:
            yield from self._dense_tensors(config.pooling.dense)

    def _dense_tensors(self, modules: tuple[DenseModule, ...]) -> Iterator[TensorSlice]:
        """Weights of the Dense modules, under our names. Raises ModelError for a module without them."""
        with ThreadPoolExecutor(self.reading.num_threads) as pool:
            for i, module in enumerate(modules):
                prefix, folder = f"projections.layers.{i}.", self.folder / module.folder
                path = folder / "model.safetensors"
                if path.is_file():
                    with open_safetensors(path, pool, self.reading.uses_mmap) as file:
                        for name, reader in file.tensors():
                            shown = f"{module.folder}/{path.name}"
                            yield TensorSlice(prefix + name.removeprefix("linear."), shown, reader)
                    continue
                path = folder / "pytorch_model.bin"
                if not path.is_file():
                    raise ModelError(f"{module.folder} has no model.safetensors; finish the download")
                for name, loaded in torch_tensors(path):
                    shown = f"{module.folder}/{path.name}"
                    yield TensorSlice(prefix + name.removeprefix("linear."), shown, loaded)

    def _stored_tensors(
        self, kind: StoredAs, files: list[Path], config: ModelConfig
    ) -> Iterator[TensorSlice]:
        if kind == "npcache":
            for name, loaded in cached_tensors(self.folder, files):
                yield TensorSlice(name, name, loaded)
        elif kind == "pt":
            for path in files:
                for name, loaded in torch_tensors(path):
                    yield TensorSlice(name, path.name, loaded)
        else:
            with ThreadPoolExecutor(self.reading.num_threads) as pool:
                for path in files:
                    yield from self._of_file(kind, path, pool, config)

    def _of_file(
        self, kind: StoredAs, path: Path, pool: ThreadPoolExecutor, config: ModelConfig
    ) -> Iterator[TensorSlice]:
        with open_safetensors(path, pool, self.reading.uses_mmap) as file:
            regions = (
                stored_regions(path, file.header.metadata, self.rank, self.num_ranks)
                if kind == "sharded_state"
                else {}
            )
            for name, reader in file.tensors():
                if kind == "mistral":
                    yield TensorSlice(*mistral_tensor(name, path.name, reader, config))
                elif kind == "sharded_state":
                    shard = ShardTensor(reader, regions.get(name), f"{name} in {path.name}")
                    yield TensorSlice(
                        name, path.name, shard, stored_bytes(reader.get_shape(), reader.get_dtype())
                    )
                else:
                    yield TensorSlice(name, path.name, reader)


def gguf_tensors(path: Path) -> Iterator[TensorSlice]:
    """All tensors of a GGUF checkpoint, under their names in the Hugging Face layout. Raises ModelError."""
    octets: dict[str, Tensor] = {}
    for source in sources(read_gguf(path)):
        stored = source.tensor
        for one in (stored, source.second):
            if one is not None and one.path not in octets:
                octets[one.path] = mapped_octets(one.path)
        reader = JoinedRows(source, octets) if source.form else GgmlRows(source, octets[stored.path])
        yield TensorSlice(source.name, Path(stored.path).name, reader, num_bytes(source))
