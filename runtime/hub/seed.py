"""A model whose files come from a server that serves it (--load-format remote_instance; seed_files.py has the
routes). They are copied to a folder of this machine, the small ones first."""

import os
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec

from runtime.errors import ModelError
from runtime.hub.seed_files import CHUNK_BYTES, DIGEST_BYTES, SeedFiles
from runtime.hub.source import HubModel, RemoteFile
from runtime.storage.settings import cache_folder

TIMEOUT_S = 60.0  # without a byte
MAX_LIST_BYTES = 1 << 24
KEY_VARIABLE = "RUNTIME_SEED_KEY"  # of the process that downloads: keys do not stand in argument lists


class SeedServer:
    """The files of a server's model, and their copies on this machine. A Source of child.py.

    The folder of the copies is named by the list of files, so it never has files of two models. `revision` of
    the model is that name, once it is known.
    """

    def __init__(self, model: HubModel, key: str | None) -> None:
        self.model = model
        self._key = key
        self._parent = Path(model.cache_dir) if model.cache_dir else cache_folder() / "remote"
        self._version = model.revision or ""
        self._sizes: dict[str, int] = {}

    @property
    def folder(self) -> Path:
        """Where the copies lie."""
        return self._parent / f"seed-{self._version}"

    def files(self) -> list[RemoteFile]:
        """All files of the model. Raises ModelError where the server cannot be reached, refuses the key, or
        has other files than a moment ago."""
        with self._get("/model_files") as response:
            try:
                raw = response.read(MAX_LIST_BYTES)
                listed = msgspec.json.decode(raw, type=SeedFiles)
            except (OSError, HTTPException, msgspec.MsgspecError) as error:
                raise ModelError(f"{self._named()} sent no list of files ({error})") from None
        wrong = [file.name for file in listed.files if _leaves_folder(file.name)]
        if wrong:
            raise ModelError(f"{self._named()} lists {wrong[0]!r}, which is no file of a model's folder")
        if self._version not in ("", listed.version):
            raise ModelError(
                f"{self._named()} has other files than when this start began; start this server again"
            )
        self._version = listed.version
        self._sizes = {file.name: file.size for file in listed.files}
        return [RemoteFile(file.name, file.size, None) for file in listed.files]

    def fetch(self, name: str) -> Path:
        """Copies a file, or what is missing of it, unless it is here. Raises ModelError."""
        target, size = self.folder / name, self._sizes[name]
        if self.is_stored(RemoteFile(name, size, None)):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        digest = self._completed(name, part, size)
        if digest != _digest_of(part):
            part.unlink()
            raise ModelError(
                f"{name} arrived damaged from {self._named()}: its SHA-256 is another one; start this server "
                "again"
            )
        os.replace(part, target)
        return target

    def _completed(self, name: str, part: Path, size: int) -> bytes:
        """Appends what is missing of a file. -> the SHA-256 that the server read. Raises ModelError."""
        offset = part.stat().st_size if part.is_file() else 0
        if offset > size:
            part.unlink()
            offset = 0
        try:
            with self._get(f"/model_files/{quote(name)}?offset={offset}") as response, part.open("ab") as out:
                left = size - offset
                while left:
                    chunk = response.read(min(left, CHUNK_BYTES))
                    if not chunk:
                        raise ConnectionError("the answer ended early")
                    out.write(chunk)
                    left -= len(chunk)
                digest = response.read(DIGEST_BYTES)
        except (OSError, HTTPException) as error:
            here = part.stat().st_size if part.is_file() else 0
            raise ModelError(
                f"{self._named()} was lost while it sent {name} ({here} of {size} bytes are here): "
                f"{error or type(error).__name__}; start it again, then this server, which goes on from there"
            ) from None
        if len(digest) != DIGEST_BYTES:
            raise ModelError(f"{self._named()} sent {name} without its SHA-256; start this server again")
        return digest

    def forget(self, stored: Path) -> None:
        """Removes a stored file that is damaged."""
        stored.unlink(missing_ok=True)

    def stored_folder(self) -> Path | None:
        """None: the list of files is needed, whatever is here."""
        return None

    def is_stored(self, file: RemoteFile) -> bool:
        """Whether the file is here as a whole; it was checked when it came."""
        target = self.folder / file.name
        return target.is_file() and target.stat().st_size == file.size

    def num_bytes(self, files: list[RemoteFile]) -> int:
        """Bytes of these files that are here, finished or not."""
        paths = [self.folder / file.name for file in files]
        both = [(path, path.with_name(f"{path.name}.part")) for path in paths]
        return sum(max((p.stat().st_size for p in pair if p.is_file()), default=0) for pair in both)

    def _named(self) -> str:
        return f"the server {self.model.repo} (--remote-instance-weight-loader-seed-instance-ip)"

    def _get(self, path: str) -> "_Answer":
        """An answer with status 200. Raises ModelError."""
        parts = urlsplit(self.model.repo)
        connection = HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        headers = {} if self._key is None else {"authorization": f"Bearer {self._key}"}
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            raise ModelError(
                f"{self._named()} cannot be reached: {error or type(error).__name__}; start it, or correct "
                "address and port"
            ) from None
        if response.status == 200:
            return _Answer(connection, response)
        text = response.read(1000).decode("utf-8", "replace")
        connection.close()
        if response.status in (401, 403):
            raise ModelError(f"{self._named()} refuses this server's --admin-api-key; give both the same key")
        raise ModelError(f"{self._named()} answers {path} with status {response.status}: {text}")


class _Answer:
    """An answer that is being read; the connection ends with it."""

    def __init__(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        self._connection = connection
        self._response = response

    def __enter__(self) -> HTTPResponse:
        return self._response

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _leaves_folder(name: str) -> bool:
    parts = name.split("/")
    return not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts)


def _digest_of(path: Path) -> bytes:
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()
