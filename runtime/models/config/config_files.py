"""config.json and generation_config.json of a model folder, or what a GGUF file has in their place.
Torch-free."""

from pathlib import Path
from typing import TypeVar

import msgspec

from runtime.errors import ModelError
from runtime.models.config.gguf.config import config_fields
from runtime.models.config.gguf.container import is_gguf
from runtime.regular_file import read_regular

MAX_BYTES = 1 << 24  # of config.json
T = TypeVar("T")


def raw_files(folder: Path) -> tuple[bytes, bytes]:
    """config.json and generation_config.json, of a GGUF file what they would say. Raises ModelError."""
    if is_gguf(folder):
        config, generation = config_fields(folder)
        return msgspec.json.encode(config), msgspec.json.encode(generation)
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; --model-path wants a folder with config.json and *.safetensors, or a "
            "GGUF file"
        )
    try:
        raw = read_regular(folder / "config.json", MAX_BYTES)
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no config.json; --model-path wants the model's own folder in Hugging Face layout"
        ) from None
    except OSError as error:
        raise ModelError(
            f"config.json of {folder} cannot be read ({error.strerror}); restore it from the model's source"
        ) from None
    path = folder / "generation_config.json"
    return raw, read_regular(path) if path.is_file() else b"{}"


def decode(raw: bytes, kind: type[T], name: str) -> T:
    """A file's contents as a struct. Raises ModelError, naming the file."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(
            f"{name} cannot be read: {error}; restore the file from the model's source"
        ) from None
