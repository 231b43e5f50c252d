"""Numbers of a GGUF file's metadata, and of its small tensors."""

import struct

from runtime.errors import ModelError
from runtime.models.config.gguf.container import Gguf, GgufTensor, Value
from runtime.regular_file import open_regular

MAX_NUMBERS = 1 << 16  # bytes of a tensor that is read as numbers


class Metadata:
    """Numbers of one architecture's metadata."""

    def __init__(self, gguf: Gguf, arch: str) -> None:
        self.gguf, self.arch = gguf, arch

    def value(self, key: str) -> Value | None:
        """What the file has behind the architecture and a dot; None: nothing."""
        return self.gguf.metadata.get(f"{self.arch}.{key}")

    def number(self, key: str) -> int | float | None:
        """A number; None: there is none. Of one for each layer those that are 0 do not count: of layers that
        have nothing of the kind. Raises ModelError for what is no number, or where the others differ."""
        value = self.value(key)
        if isinstance(value, tuple) and len(kinds := set(value) - {0} or set(value)) == 1:
            value = kinds.pop()
        if value is None or isinstance(value, int | float):
            return value
        what = "differs from layer to layer" if isinstance(value, tuple) else "is no number"
        raise ModelError(
            f"{self.gguf.paths[0].name}: {self.arch}.{key} {what}, which is not supported; take the model in "
            "Hugging Face layout"
        )

    def needed(self, key: str) -> int | float:
        """A number. Raises ModelError where there is none."""
        if (value := self.number(key)) is None:
            raise ModelError(
                f"{self.gguf.paths[0].name} has no {self.arch}.{key}; convert the model again with a newer "
                "llama.cpp"
            )
        return value

    def layer_types(self) -> list[str] | None:
        """Which layers have a sliding window, in the words of config.json; None: the file does not say."""
        pattern = self.value("attention.sliding_window_pattern")
        if not isinstance(pattern, tuple):
            return None
        return ["sliding_attention" if one else "full_attention" for one in pattern]

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of this name."""
        return tensor in self.gguf.tensors

    def floats(self, tensor: str) -> list[float] | None:
        """The numbers of a small tensor of F32; None: there is none. Raises ModelError for another one."""
        found = self.gguf.tensors.get(tensor)
        return None if found is None else _floats(found)


def _floats(tensor: GgufTensor) -> list[float]:
    if tensor.type != "F32" or tensor.num_bytes > MAX_NUMBERS:
        raise ModelError(f"{tensor.name} is of type {tensor.type}; F32 was expected")
    with open_regular(tensor.path) as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes)))
