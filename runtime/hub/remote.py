"""Models at a URL (s3://, http://, gs://, file:// ...), through fsspec: --model-path URL. Their files are
copied to a folder of this machine, the small ones first."""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import msgspec

from runtime.errors import ModelError, install_line
from runtime.hub.source import HubModel, RemoteFile
from runtime.json_value import Fields
from runtime.storage.settings import cache_folder

STAMPS = (
    "ETag",
    "etag",
    "LastModified",
    "mtime",
    "generation",
    "md5",
)  # by which a file is known to have changed


class FileSystem(Protocol):
    """What is used of fsspec's file systems."""

    def find(self, path: str, *, maxdepth: int, detail: bool) -> dict[str, Fields]:
        """All files below a folder."""
        ...

    def ls(self, path: str, *, detail: bool) -> list[str]:
        """The names in a folder. Raises FileNotFoundError, OSError."""
        ...

    def info(self, path: str) -> Fields:
        """What is known of a file."""
        ...

    def get_file(self, rpath: str, lpath: str) -> None:
        """Copies a file to this machine."""
        ...


class RemoteFolder:
    """A model's folder at a URL, and its copy on this machine. A Source of child.py."""

    def __init__(self, model: HubModel) -> None:
        """Raises ModelError where fsspec, or what it needs for the scheme, is not installed."""
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ModelError(f"a model at a URL needs fsspec: {install_line('remote')}") from None
        self.model = model
        try:
            fs, root = url_to_fs(model.repo)
        except (ImportError, ValueError) as error:
            raise ModelError(f"{model.repo} cannot be opened: {error}") from None
        self._fs: FileSystem = fs
        self._root = str(root).rstrip("/")
        parent = Path(model.cache_dir) if model.cache_dir else cache_folder() / "remote"
        digest = blake2b(model.repo.encode(), digest_size=8).hexdigest()
        self._folder = parent / f"{self._root.rpartition('/')[2]}-{digest}"
        self._known: dict[str, tuple[int, str]] = {}  # bytes and stamp by name

    def files(self) -> list[RemoteFile] | None:
        """All files of the folder; None where it cannot be reached."""
        try:
            self._fs.ls(self._root, detail=False)  # which fails where `find` finds nothing
            found = self._fs.find(self._root, maxdepth=2, detail=True)
            for path, entry in found.items():
                name = path.removeprefix(self._root).lstrip("/").partition("?")[0]
                size = entry.get("size")
                if not isinstance(size, int):
                    entry = self._fs.info(path)
                    size = entry.get("size")
                if not name or ".." in name.split("/") or not isinstance(size, int):
                    continue  # a page of links has others than files
                self._known[name] = size, next((str(entry[key]) for key in STAMPS if entry.get(key)), "")
        except FileNotFoundError:
            raise ModelError(
                f"{self.model.repo} does not exist; give the URL of the model's folder"
            ) from None
        except OSError:
            return None
        return [RemoteFile(name, size, None) for name, (size, _) in self._known.items()]

    def fetch(self, name: str) -> Path:
        """Copies a file, unless it is here already."""
        target = self._folder / name
        if not self.is_stored(RemoteFile(name, self._known[name][0], None)):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._stamp(name).parent.mkdir(exist_ok=True)
            part = target.with_name(f"{target.name}.part")
            self._fs.get_file(f"{self._root}/{name}", str(part))
            self._stamp(name).write_bytes(msgspec.json.encode(self._known[name]))
            os.replace(part, target)
        return target

    def forget(self, stored: Path) -> None:
        """Removes a stored file that is damaged."""
        stored.unlink(missing_ok=True)

    def stored_folder(self) -> Path | None:
        """The copy of an earlier start; None: there is none."""
        return self._folder if self._folder.is_dir() else None

    def is_stored(self, file: RemoteFile) -> bool:
        """Whether the file is here as a whole, and is the one that the URL has."""
        target, stamp = self._folder / file.name, self._stamp(file.name)
        if not target.is_file() or target.stat().st_size != file.size or not stamp.is_file():
            return False
        return stamp.read_bytes() == msgspec.json.encode(self._known[file.name])

    def num_bytes(self, files: list[RemoteFile]) -> int:
        """Bytes of these files that are here."""
        paths = [self._folder / file.name for file in files]
        both = [(path, path.with_name(f"{path.name}.part")) for path in paths]
        return sum(max((p.stat().st_size for p in pair if p.is_file()), default=0) for pair in both)

    def _stamp(self, name: str) -> Path:
        return self._folder / ".stamps" / name.replace("/", "-")
