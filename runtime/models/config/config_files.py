"""config.json and generation_config.json of a model folder, or what a GGUF file has in their place.
Torch-free."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from runtime.errors import ModelError
from runtime.json_value import JsonDict
from runtime.models.config.gguf.config import config_fields
from runtime.models.config.gguf.container import is_gguf
from runtime.models.config.mistral_params import PARAMS_FILE, Params, config_of_params
from runtime.regular_file import read_regular

MAX_BYTES = 1 << 24  # of config.json
T = TypeVar("T")
Keys = Iterable[tuple[str, str]]  # names of fields in a file, and ours


def raw_files(folder: Path, config_file: str | None = None) -> tuple[bytes, bytes]:
    """config.json and generation_config.json, of a GGUF file what they would say. `config_file`: read in
    place of config.json. Raises ModelError."""
    if is_gguf(folder):
        config, generation = config_fields(folder)
        return msgspec.json.encode(config), msgspec.json.encode(generation)
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; --model-path wants a folder with config.json and *.safetensors, or a "
            "GGUF file"
        )
    config_path = Path(config_file) if config_file else folder / "config.json"
    if not config_path.exists() and not config_file and (folder / PARAMS_FILE).is_file():
        raw = read_regular(folder / PARAMS_FILE, MAX_BYTES)
        config, generation = config_of_params(
            decode(raw, Params, PARAMS_FILE), decode(raw, JsonDict, PARAMS_FILE)
        )
        return msgspec.json.encode(config), msgspec.json.encode(generation)
    try:
        raw = read_regular(config_path, MAX_BYTES)
    except FileNotFoundError:
        if config_file:
            raise ModelError(
                f"--decrypted-config-file {config_file} does not exist; name another one"
            ) from None
        raise ModelError(
            f"{folder} has no config.json; --model-path wants the model's own folder in Hugging Face layout"
        ) from None
    except OSError as error:
        if config_file:
            raise ModelError(
                f"--decrypted-config-file {config_file} cannot be read ({error.strerror}); name another one"
            ) from None
        raise ModelError(
            f"{config_path.name} of {config_path.parent} cannot be read ({error.strerror}); "
            "restore it from the model's source"
        ) from None
    path = folder / "generation_config.json"
    return strict(raw), read_regular(path) if path.is_file() else b"{}"


def strict(raw: bytes) -> bytes:
    """JSON in which names of numbers that JSON has not, as Infinity in the time_step_limit of Mamba 2,
    are null. What is no JSON anyway is returned as it is."""
    if not any(name in raw for name in (b"Infinity", b"NaN")):
        return raw
    try:
        return msgspec.json.encode(json.loads(raw))
    except (ValueError, OverflowError, RecursionError):
        return raw


def decode(raw: bytes, kind: type[T], name: str, keys: Keys = ()) -> T:
    """A file's contents as a struct. Raises ModelError, naming the file, and fields as `keys` has them."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(
            f"{name} cannot be read: {in_the_files_words(str(error), keys)}; restore the file from the "
            "model's source"
        ) from None


def in_the_files_words(text: str, keys: Keys) -> str:
    """A text in which our names of fields are replaced by those of the file."""
    for theirs, ours in keys:
        text = re.sub(rf"\b{ours}\b", theirs, text)
    return text
