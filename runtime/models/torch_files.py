"""Tensors of files that torch.save wrote (*.bin, *.pt, *.pth).

Such a file is a pickle, which could run any code. It is read by torch's restricted unpickler
(`weights_only=True`), which makes tensors, numbers, texts and containers of them, and nothing else: a file
that asks for more is refused.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.weight import Index
from runtime.models.config.weight_files import check_pickled, damaged
from runtime.models.file_tensor import DTYPE_NAMES

WRAPPERS = ("state_dict", "model_state_dict")  # keys under which some programs save the tensors


class LoadedTensor:
    """A TensorReader (layers/weight.py) of a tensor in memory, or in pages of a mapped file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """The tensor's shape."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The dtype by safetensors' name."""
        return DTYPE_NAMES[self._tensor.dtype]

    def __getitem__(self, index: Index) -> Tensor:
        return self._tensor[index]


def torch_tensors(path: Path) -> Iterator[tuple[str, LoadedTensor]]:
    """The tensors of a file by name. The file is mapped, unless it is of a torch before 1.6: then it is in
    memory until the last of them was taken. Raises ModelError, naming file and tensor."""
    is_zip = check_pickled(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a damaged pickle raises whatever its next byte means
        if type(error).__name__ == "UnpicklingError":
            why = str(error).partition("\n")[0]
            raise ModelError(
                f"{path.name} cannot be unpickled as tensors alone ({why}); take the model's *.safetensors"
            ) from None
        raise damaged(path, f"{type(error).__name__}: {error}".partition("\n")[0]) from None
    for key in WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict):
        raise ModelError(f"{path.name} holds a {type(found).__name__} instead of tensors by name")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelError(
                f"{name!r} in {path.name} is a {type(tensor).__name__} and no tensor; take the model's "
                "*.safetensors"
            )
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPE_NAMES:
            raise ModelError(
                f"{name} in {path.name} is a tensor of {tensor.dtype} in the layout {tensor.layout}, which "
                "is not read"
            )
        yield name, LoadedTensor(tensor.detach())


def torch_numbers(path: Path) -> list[int]:
    """The whole numbers of a file in which torch.save wrote one tensor or a list of them. Raises ModelError,
    naming the file."""
    check_pickled(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        tensor = torch.as_tensor(found)
    except Exception as error:  # as above, and of what is no list of numbers
        raise damaged(path, f"{type(error).__name__}: {error}".partition("\n")[0]) from None
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() != 1 or not len(tensor):
        raise ModelError(f"{path.name} holds no list of whole numbers")
    numbers: list[int] = tensor.tolist()
    return numbers
