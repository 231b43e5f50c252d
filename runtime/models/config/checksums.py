"""--model-checksum: compares a model's files with a list of SHA-256 checksums. Torch-free; reads every
byte."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import file_digest
from pathlib import Path

import msgspec

from runtime.errors import StartError
from runtime.json_value import Fields
from runtime.models.config.gguf.container import is_gguf, split_paths
from runtime.regular_file import open_regular, read_text

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")  # files that must be in the list
MAX_BYTES = 64 * 2**20  # of the list
THREADS = 4  # hashing releases the GIL, and disks are faster with a few readers


def check_files(folder: Path, list_file: Path) -> int:
    """Compares the files of `folder`, or a GGUF file, with `list_file`. -> how many were compared. Raises
    StartError for a file that differs or is missing, and for weight files that are not in the list."""
    listed = read_list(list_file)
    weights = [path.name for pattern in WEIGHTS for path in folder.glob(pattern)]
    if is_gguf(folder):  # its own files alone: the folder may have other models
        weights = [path.name for path in split_paths(folder)]
        listed = {name: listed[name] for name in weights if name in listed}
        folder = folder.parent
    if unlisted := sorted(name for name in weights if name not in listed):
        raise StartError(
            f"{list_file} does not name {unlisted[0]} ({len(unlisted)} weight files are not in it); remove "
            "what does not "
            "belong to the model, or add it to the list"
        )
    with ThreadPoolExecutor(THREADS) as pool:
        for name, checksum in zip(listed, pool.map(lambda name: digest(folder / name), listed), strict=True):
            if checksum is None:
                raise StartError(
                    f"{name} is in {list_file}, and {folder} has no such file; finish the download of the "
                    "model"
                )
            if checksum != listed[name]:
                raise StartError(
                    f"{name} is not what {list_file} says: its SHA-256 is {checksum}, not {listed[name]}; "
                    "download it again"
                )
    return len(listed)


def digest(file: Path) -> str | None:
    """SHA-256 of a file in hex; None: it cannot be read."""
    try:
        with open_regular(file) as opened:
            return file_digest(opened, "sha256").hexdigest()
    except OSError:
        return None


def read_list(file: Path) -> Mapping[str, str]:
    """Checksums by file name: lines as sha256sum writes them, or a JSON object of them, which may be below
    `files`. Raises StartError."""
    try:
        text = read_text(file, MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(
            f"--model-checksum {file} cannot be read ({error}); it wants a file with checksums"
        ) from None
    try:
        entries = _of_json(text) if text.lstrip().startswith("{") else _of_lines(text)
        checksums = {name: entry.removeprefix("sha256:").lower() for name, entry in entries.items()}
    except (msgspec.MsgspecError, ValueError, AttributeError):
        checksums = {}
    if not checksums or not all(
        len(entry) == 64 and set(entry) <= set("0123456789abcdef") and is_below(name)
        for name, entry in checksums.items()
    ):
        raise StartError(
            f"--model-checksum {file} is no list of SHA-256 checksums; make one in the model's folder with "
            "`sha256sum *.safetensors *.json`"
        )
    return checksums


def is_below(name: str) -> bool:
    """Whether the path stays in the folder."""
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


def _of_lines(text: str) -> dict[str, str]:
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return {name.removeprefix("*"): entry for entry, name in pairs}


def _of_json(text: str) -> dict[str, str]:
    checksums: Fields = msgspec.json.decode(text)
    entries = checksums.get("files", checksums)
    return {
        name: entry["sha256"] if isinstance(entry, dict) and "sha256" in entry else entry
        for name, entry in entries.items()
    }
