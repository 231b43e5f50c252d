"""Pages in a storage backend: makes and verifies records, counts, and turns every failure into a miss.

The methods are called in worker threads, several at a time.
"""

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic

from msgspec import Struct

from runtime import log
from runtime.errors import StartError, Unavailable
from runtime.json_value import JsonValue
from runtime.storage.backend import Backend, BackendConfig, Damaged
from runtime.storage.eic import EicBackend
from runtime.storage.files import FileBackend
from runtime.storage.hf3fs import open_hf3fs
from runtime.storage.mooncake import MooncakeBackend
from runtime.storage.nixl import open_nixl
from runtime.storage.process import ProcessBackend
from runtime.storage.record import HEADER_BYTES, header, is_intact

LOG_AGAIN_S = 3600.0  # the same kind of error is logged once in this time


class Totals(Struct):
    """Counts since the start. Seconds are time of worker threads."""

    pages_written: int = 0
    pages_read: int = 0
    pages_missed: int = 0  # requested and not there any more
    pages_corrupt: int = 0  # damaged, and removed
    pages_dropped: int = 0  # not written because writing could not keep up
    errors: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    write_s: float = 0.0
    read_s: float = 0.0


class Store:
    """Pages by key. A page is passed as parts: contiguous views of its bytes on every rank, always in the
    same order."""

    def __init__(self, backend: Backend, identity: bytes) -> None:
        self.totals = Totals()
        self._backend = backend
        self._identity = identity
        self._lock = threading.Lock()  # guards totals and _logged_s
        self._logged_s: dict[str, float] = {}
        self._log = log.get("storage")

    def count(self, keys: Sequence[bytes]) -> int:
        """How many pages storage has, from the first key on."""
        try:
            return self._backend.contains(keys)
        except Exception as error:  # plug-ins raise anything
            self._log_error("look up", error)
            return 0

    def load(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Fills the parts with the page. False: it is not there, or damaged, and the parts' contents are
        undefined."""
        begin = monotonic()
        head = bytearray(HEADER_BYTES)
        try:
            is_there = self._backend.read(key, [memoryview(head), *parts])
            is_damaged = is_there and not is_intact(head, self._identity, key, parts)
        except Damaged:
            is_there, is_damaged = True, True
        except Exception as error:
            self._log_error("read", error)
            is_there, is_damaged = False, False
        if is_damaged:
            self._remove(key)
        totals, is_read = self.totals, is_there and not is_damaged
        with self._lock:
            totals.read_s += monotonic() - begin
            totals.pages_read += is_read
            totals.bytes_read += sum(part.nbytes for part in parts) if is_read else 0
            totals.pages_corrupt += is_damaged
            totals.pages_missed += not is_there
        return is_read

    def save(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """Writes the page, unless storage has it."""
        begin = monotonic()
        try:
            if self._backend.contains([key]):
                return
            head = header(self._identity, key, parts)
            self._backend.write(key, [memoryview(head), *parts])
        except Exception as error:
            self._log_error("write", error)
            return
        with self._lock:
            self.totals.write_s += monotonic() - begin
            self.totals.pages_written += 1
            self.totals.bytes_written += sum(part.nbytes for part in parts)

    def clear(self) -> int:
        """Deletes all pages of this identity. -> how many. Blocks. Raises Unavailable."""
        try:
            return self._backend.clear()
        except Exception as error:
            self._log_error("clear", error)
            raise Unavailable("the storage tier cannot be cleared; the server's log says why") from error

    def stats(self) -> Mapping[str, float]:
        """The backend's statistics."""
        try:
            return self._backend.stats()
        except Exception as error:
            self._log_error("count", error)
            return {}

    def close(self) -> None:
        """Closes the backend."""
        try:
            self._backend.close()
        except Exception as error:
            self._log_error("close", error)

    def _remove(self, key: bytes) -> None:
        self._log.warning("a record in storage was damaged and is removed", key=key.hex())
        try:
            self._backend.remove(key)
        except Exception as error:
            self._log_error("remove", error)

    def _log_error(self, verb: str, error: Exception) -> None:
        kind = f"{verb} {type(error).__name__} {getattr(error, 'errno', '')}"
        now = monotonic()
        with self._lock:
            self.totals.errors += 1
            is_new = now - self._logged_s.get(kind, -LOG_AGAIN_S) >= LOG_AGAIN_S
            if is_new:
                self._logged_s[kind] = now
        if is_new:
            self._log.error(
                f"storage cannot {verb} records; that is a miss, and this is not logged again for a while",
                error=f"{type(error).__name__}: {error}",
            )


# backends of this version; the others are plug-ins
OWN: dict[str, Callable[[BackendConfig], Backend]] = {
    "file": FileBackend,
    "mooncake": MooncakeBackend,
    "hf3fs": open_hf3fs,
    "nixl": open_nixl,
    "eic": EicBackend,
    **{name: partial(ProcessBackend, name) for name in ("aibrix", "lmcache", "simm")},
}


def open_store(backend: str, settings: Mapping[str, JsonValue], identity: bytes, page_bytes: int) -> Store:
    """Opens the backend that --hicache-storage-backend names. Blocks. Raises StartError."""
    config = BackendConfig(record_bytes=HEADER_BYTES + page_bytes, identity=identity, settings=dict(settings))
    return Store(OWN.get(backend, _plug_in)(config), identity)


def _plug_in(config: BackendConfig) -> Backend:
    module, _, name = str(config.settings["module"]).partition(":")
    config.settings.pop("module")
    try:
        backend: Backend = getattr(importlib.import_module(module), name)(config)
    except Exception as error:
        raise StartError(
            f'the storage backend {module}:{name} ("module" in --hicache-storage-backend-extra-config) '
            f"cannot be opened ({type(error).__name__}: {error}); repair or leave it out"
        ) from error
    return backend
