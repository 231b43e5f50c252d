"""--load-format npcache: the tensors of pickled files as numpy files, which are mapped instead of unpickled.

np/weight_names.json   the names, as vLLM and SGLang write them
np/sources.json        sizes and times of the files that the cache was made of, and dtypes that numpy lacks
np/NAME                a tensor, as numpy.save writes it; BF16 and F8 as unsigned integers of their size
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.weight_files import damaged
from runtime.models.file_tensor import DTYPE_NAMES, DTYPES
from runtime.models.torch_files import LoadedTensor, torch_tensors
from runtime.regular_file import check_regular, read_regular

FOLDER, NAMES, SOURCES = "np", "weight_names.json", "sources.json"
SAFE_NAME = re.compile(r"\w[\w.-]*")
UNSIGNED = {1: torch.uint8, 2: torch.uint16}
NUMPY_LACKS = ("BF16", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0")


class Sources(Struct, frozen=True):
    """sources.json."""

    files: list[tuple[str, int, int]]  # name, bytes, time of the last change in nanoseconds
    dtypes: dict[str, str]  # of tensors whose dtype numpy lacks, by safetensors' names


def cached_tensors(folder: Path, files: list[Path]) -> Iterator[tuple[str, LoadedTensor]]:
    """All tensors of a model's pickled files, from its cache, which is made if it is not there or is older
    than they. Raises ModelError."""
    cache = folder / FOLDER
    stamps = [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    try:
        with _locked(cache):
            sources = _read_sources(cache)
            if sources is None or (sources.files and sources.files != stamps):
                sources = _write(cache, files, stamps)
        names = msgspec.json.decode(read_regular(cache / NAMES), type=list[str])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(
            f"the numpy cache {cache} cannot be used ({error}); remove that folder, or take --load-format pt"
        ) from None
    for name in names:
        yield name, _read(cache, name, sources.dtypes.get(name))


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """The ranks of a server make one cache."""
    cache.mkdir(exist_ok=True)
    descriptor = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_sources(cache: Path) -> Sources | None:
    if not (cache / NAMES).is_file():
        return None
    if not (cache / SOURCES).is_file():
        return Sources([], {})  # made by another program: nothing says of what
    return msgspec.json.decode(read_regular(cache / SOURCES), type=Sources)


def _write(cache: Path, files: list[Path], stamps: list[tuple[str, int, int]]) -> Sources:
    (cache / NAMES).unlink(missing_ok=True)
    names: list[str] = []
    dtypes: dict[str, str] = {}
    for path in files:
        for name, reader in torch_tensors(path):
            if SAFE_NAME.fullmatch(name) is None or name in (NAMES, SOURCES):
                raise ModelError(f"{path.name} has a tensor named {name!r}, which no file can be named after")
            tensor = reader[...].contiguous()
            if reader.get_dtype() in NUMPY_LACKS:
                dtypes[name] = reader.get_dtype()
                tensor = tensor.view(UNSIGNED[tensor.dtype.itemsize])
            with (cache / name).open("wb") as file:
                np.save(file, tensor.numpy(), allow_pickle=False)
            names.append(name)
    sources = Sources(stamps, dtypes)
    (cache / SOURCES).write_bytes(msgspec.json.encode(sources))
    (cache / NAMES).write_bytes(msgspec.json.encode(names))
    return sources


def _read(cache: Path, name: str, dtype: str | None) -> LoadedTensor:
    path = cache / name
    if SAFE_NAME.fullmatch(name) is None:
        raise ModelError(f"{NAMES} names {name!r}, which is no file of the cache; remove the folder {cache}")
    try:
        check_regular(path)
        mapped = np.load(path, mmap_mode="c", allow_pickle=False)
        tensor = torch.from_numpy(mapped)
        if dtype is not None:
            tensor = tensor.view(DTYPES[dtype])
    except Exception as error:  # numpy raises what its header's text means
        raise damaged(path, f"{type(error).__name__}: {error}") from None
    if tensor.dtype not in DTYPE_NAMES:
        raise ModelError(f"{name} in {cache} is of dtype {tensor.dtype}, which is not read")
    return LoadedTensor(tensor)
