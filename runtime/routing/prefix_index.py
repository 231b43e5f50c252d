"""Which server has computed which beginnings of prompts, approximately: what was sent there lately.

A text is cut into blocks, and each block's key is a hash chained over all blocks before it, so one look-up a
block follows the longest known beginning. This is the radix tree of SGLang's cache-aware policy with edges of
a fixed length.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

BLOCK_BYTES = 64
MAX_BLOCKS = 4096  # of one text: its first 256 KiB decide


class PrefixIndex:
    """Servers by beginnings of texts; at most `max_blocks` blocks, those used longest ago go first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._servers: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._servers)

    def match(self, keys: Sequence[int], servers: Collection[str]) -> tuple[str | None, float]:
        """The one of `servers` that was sent the longest beginning of the text of these keys, and that
        beginning's share of the text, 0 to 1; None and 0 when none was sent any."""
        best, depth = None, 0
        for number, key in enumerate(keys, start=1):
            known = self._servers.get(key)
            if known is None:
                break
            found = best if best in known else next((one for one in servers if one in known), None)
            if found is None:
                break
            best, depth = found, number
        return best, depth / len(keys)

    def insert(self, keys: Sequence[int], server: str) -> None:
        """Remembers that the text of these keys was sent to `server`."""
        for key in reversed(keys):  # beginnings become the newest, so that ends are evicted first
            self._servers.setdefault(key, set()).add(server)
            self._servers.move_to_end(key)
        while len(self._servers) > self._max_blocks:
            self._servers.popitem(last=False)

    def remove(self, server: str) -> None:
        """Forgets a server: its cache is gone."""
        for key in [key for key, known in self._servers.items() if server in known]:
            self._servers[key].discard(server)
            if not self._servers[key]:
                del self._servers[key]


def keys_of(text: bytes) -> list[int]:
    """Keys of the whole blocks of a text; of a text shorter than a block, the key of all of it."""
    keys: list[int] = []
    last = 0
    for start in range(0, min(max(BLOCK_BYTES, len(text)), MAX_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        block = text[start : start + BLOCK_BYTES]
        if keys and len(block) < BLOCK_BYTES:
            break
        last = hash((last, block))
        keys.append(last)
    return keys
