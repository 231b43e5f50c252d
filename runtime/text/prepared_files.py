"""Files of earlier requests, as they were prepared: an equal one is not decoded again.

Clients send the images of a conversation again with each turn, in base64. The text is hashed, in a worker
thread; where all files of a request are known, no spool, decoder or processor has to do with them. What an
http or file URL names may change, so such files are loaded each time.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from threading import Lock
from typing import Generic, TypeVar

from runtime.gil import give_way
from runtime.media_kind import MediaKind
from runtime.messages.media import MediaSource

T = TypeVar("T")

PART_CHARS = 1 << 18  # hashed at a time
MAX_BYTES = 256 << 20  # of the arrays that are kept, where host memory has room for them


class PreparedFiles(Generic[T]):
    """Up to `max_bytes` of prepared files, of which the least recently used are dropped. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._files: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that are kept."""
        return self._num_bytes

    def find(self, keys: Sequence[bytes]) -> list[T] | None:
        """The files of these keys; None: not all of them are known."""
        with self._lock:
            if not keys or not all(key in self._files for key in keys):
                return None
            for key in keys:
                self._files.move_to_end(key)
            return [self._files[key][0] for key in keys]

    def add(self, key: bytes, file: T, num_bytes: int) -> None:
        """Keeps a file, if there is room for it."""
        if num_bytes > self.max_bytes:
            return
        with self._lock:
            _, before = self._files.pop(key, (None, 0))
            self._files[key] = file, num_bytes
            self._num_bytes += num_bytes - before
            while self._num_bytes > self.max_bytes:
                _, (_, dropped) = self._files.popitem(last=False)
                self._num_bytes -= dropped


def are_inline(sources: Sequence[MediaSource]) -> bool:
    """Whether the files themselves are in a request: in base64, as data URLs, or decoded."""
    return bool(sources) and all(
        one.encoded is not None or one.base64 or one.url[:5].lower() == "data:" or one.decoded is not None
        for one in sources
    )


def realm_of(tenant: str, cache_salt: str = "") -> str:
    """What requests of a tenant share files with. `tenant`: "" where tenants share them."""
    return repr((tenant, cache_salt))


def keys_of(sources: Sequence[MediaSource], realm: str) -> list[bytes]:
    """A key of each file that is in a request: of its text, and of all else that its preparation depends on.
    `realm`: requests of other realms share nothing with it. For a worker thread."""
    num_images, keys = sum(one.kind is MediaKind.IMAGE for one in sources), list[bytes]()
    indices: Counter[MediaKind] = Counter()  # of the next file of each kind
    for one in sources:
        index = indices[one.kind]
        key = sha256(f"{realm}\0{one.kind}\0{one.has_sound}\0{num_images}\0{index}\0".encode())
        key.update(b"" if one.decoded is None else one.decoded.digest)
        text = one.base64 or one.url
        for at in range(0, len(text), PART_CHARS):
            key.update(text[at : at + PART_CHARS].encode("utf-8", "surrogatepass"))
            give_way()
        if (encoded := one.encoded) is not None:
            for at in range(encoded.begin, encoded.end, PART_CHARS):
                key.update(encoded.memory.read(at, min(at + PART_CHARS, encoded.end)))
                give_way()
        keys.append(key.digest())
        indices[one.kind] += 1
    return keys
