"""The files of a model that a server offers to others (--load-format remote_instance), and how they are sent.

    GET /model_files                  names, sizes and times of change of all files
    GET /model_files/NAME?offset=N    the bytes of a file from N on, and behind them the SHA-256 of the whole
                                      file, 32 bytes

So a copy that broke off is continued, and what arrived is compared with what was read from the disk.
"""

from collections.abc import AsyncIterator
from fnmatch import fnmatch
from hashlib import sha256
from io import BufferedReader
from pathlib import Path

import anyio
import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.hub.child import FORMS, PATTERNS
from runtime.models.config.gguf.container import is_gguf
from runtime.regular_file import open_regular

DIGEST_BYTES = 32
CHUNK_BYTES = 1 << 20
OFFERED = (*PATTERNS["config"], *(name for names in FORMS.values() for name in names), "2_Dense/*")


class SeedFile(Struct, frozen=True):
    """A file of the model."""

    name: str  # with a folder in front where it lies in one
    size: int  # bytes
    changed_ns: int  # of its last change


class SeedFiles(Struct, frozen=True):
    """All files of the model, by name."""

    files: list[SeedFile]

    @property
    def version(self) -> str:
        """Stands for these files and no others."""
        return sha256(msgspec.json.encode(self.files)).hexdigest()[:16]


def seed_files(folder: Path) -> SeedFiles:
    """The files of a model's folder that a server of this model reads. Raises ModelError for a GGUF file."""
    if is_gguf(folder):
        raise ModelError("the model is a GGUF file; copy it, and give the other server its path")
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in (*folder.glob("*"), *folder.glob("*/*"))
        if path.is_file() and any(fnmatch(path.relative_to(folder).as_posix(), one) for one in OFFERED)
    )
    stats = [(name, (folder / name).stat()) for name in names if not name.startswith(".")]
    return SeedFiles([SeedFile(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


class SeedReader:
    """One file on its way to another server."""

    def __init__(self, path: Path, offset: int) -> None:
        """Raises ModelError for a file that is none, OSError where it cannot be opened."""
        self._file: BufferedReader = open_regular(path)
        self._offset = offset
        self._position = 0
        self._digest = sha256()
        self.num_bytes = max(path.stat().st_size - offset, 0) + DIGEST_BYTES

    async def parts(self) -> AsyncIterator[bytes]:
        """The bytes from the offset on, then the digest; closes the file."""
        try:
            while (part := await anyio.to_thread.run_sync(self._read)) is not None:
                if part:
                    yield part
            yield self._digest.digest()
        finally:
            self._file.close()

    def _read(self) -> bytes | None:
        """The next bytes, without those before the offset; None: the file is read."""
        chunk = self._file.read(CHUNK_BYTES)
        if not chunk:
            return None
        self._digest.update(chunk)
        skipped = min(max(self._offset - self._position, 0), len(chunk))
        self._position += len(chunk)
        return chunk[skipped:]
