"""The identity of pages: a digest of everything that decides the keys and values of given tokens.

Of each file of weights it takes the name, the length, the header (names, shapes and offsets of all tensors)
and a stamp: in a Hugging Face cache the name of the file that the link leads to, which is the digest of the
content; else the time of the last change. Reading all weights would be certain and take minutes; headers and
lengths alone are the same for all fine-tunes of a model; samples of the weights miss an edited row. So a copy
of a model whose files have other dates does not share pages with the original, unless both are started with
the same "model" in the settings, by an operator who knows that they are the same.

Servers that send each other pages while they run (runtime/transfer/) take samples instead of the stamps: they
are mostly on different machines, were started as one deployment, and keep nothing.
"""

import glob
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from runtime.regular_file import open_regular

HEADER_LIMIT = 100_000_000  # the format's own
IDENTITY_BYTES = 16
GGUF_HEAD = 1 << 23
SAMPLES, SAMPLE_BYTES = 256, 4096  # of a file


def identity(**facts: object) -> bytes:
    """The digest of facts that msgspec can encode."""
    encoded = msgspec.json.encode(sorted(facts.items()))
    return hashlib.blake2b(encoded, digest_size=IDENTITY_BYTES, person=b"runtime pages").digest()


def model_facts(config: msgspec.Struct) -> dict[str, object]:
    """What of a model's configuration decides about keys and values."""
    left_out = ("bos_id", "eos_ids", "sampling_defaults")
    return {key: value for key, value in msgspec.to_builtins(config).items() if key not in left_out}


def weight_samples(folder: Path) -> list[tuple[str, int, str, str]]:
    """(file, length, digest of its header, digest of SAMPLES pieces) of every file of weights: the same for
    copies on different machines, and another one for weights that were trained on."""
    return [
        (path.name, path.stat().st_size, _header(path), _pieces(path, path.stat().st_size))
        for path in _files(folder)
    ]


def _pieces(path: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open_regular(path) as file:
        for number in range(SAMPLES):
            file.seek(number * max(0, size - SAMPLE_BYTES) // max(1, SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def weights(folder: Path, name: str | None) -> list[tuple[str, int, str, str]]:
    """(file, length, digest of its header, stamp) of every file of weights; `name`, where given, replaces the
    stamps."""
    return [(path.name, path.stat().st_size, _header(path), name or _stamp(path)) for path in _files(folder)]


def _files(folder: Path) -> Iterator[Path]:
    if folder.is_file():  # a GGUF file, or the first part of a split one
        parts = re.sub(r"-\d{5}-of-(\d{5})\.gguf", r"-*-of-\1.gguf", glob.escape(folder.name))
        return iter(sorted(folder.parent.glob(parts)))
    return (path for path in sorted(folder.glob("*.safetensors")) if path.is_file())


def _header(path: Path) -> str:
    with open_regular(path) as file:
        first = file.read(8)
        # of a GGUF file the beginning, which has sizes and vocabulary, and mostly the tensors' places as well
        length = GGUF_HEAD if first[:4] == b"GGUF" else int.from_bytes(first, "little")
        return hashlib.blake2b(file.read(min(length, HEADER_LIMIT)), digest_size=16).hexdigest()


def _stamp(path: Path) -> str:
    real = Path(os.path.realpath(path))
    if real.parent.name == "blobs" and len(real.name) == 64:  # a SHA-256
        return real.name
    return str(path.stat().st_mtime_ns)
