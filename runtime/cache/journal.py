"""Events about pages that enter and leave the prefix cache, for routers that send requests to the server that
has their prefix.

The three events and the batch are the public schema of KV-aware routers (docs/kv_events.md): arrays with the
type's name first, whose field order is part of the schema. A journal collects events while steps are planned,
and hands them out in batches with consecutive numbers.
"""

from array import array
from hashlib import blake2b
from typing import Literal

from msgspec import Struct

from runtime.cache.node import Node

Medium = Literal["GPU", "CPU"]
HASH_BITS = (1 << 63) - 1  # readers take hashes as signed or as unsigned 64-bit integers


class Stored(Struct, array_like=True, tag="BlockStored"):
    """Pages that are cached from now on. Each is the child of the one before it, the first one of
    `parent_block_hash`."""

    block_hashes: list[int]
    parent_block_hash: int | None  # None: it begins a prompt
    token_ids: list[int]  # of all these pages
    block_size: int
    lora_id: int | None
    medium: Medium
    lora_name: str | None = None
    # other inputs of the first page's hash: the namespace
    extra_keys: list[list[str] | None] | None = None


class Removed(Struct, array_like=True, tag="BlockRemoved"):
    """Pages that are no longer on this medium."""

    block_hashes: list[int]
    medium: Medium


class Cleared(Struct, array_like=True, tag="AllBlocksCleared"):
    """All pages have been removed."""


CacheEvent = Stored | Removed | Cleared


class CacheEvents(Struct, frozen=True):
    """The events of some steps, in order. Batches are numbered consecutively, so that a reader notices when
    it has missed one."""

    number: int
    events: list[CacheEvent]


class Journal:
    """Events since the last `take`. `hashes` has all cached pages, on any medium."""

    def __init__(self, page_size: int) -> None:
        self.hashes: dict[Node, int] = {}
        self._page_size = page_size
        self._events: list[CacheEvent] = []
        self._next = 0
        self._leaf: Node | None = (
            None  # the last page of the last event, if that is a Stored which may be extended
        )

    @property
    def is_empty(self) -> bool:
        """Whether there are no events."""
        return not self._events

    def stored(self, node: Node, medium: Medium) -> None:
        """`node`, whose parent is cached or a root, has a page on the medium from now on."""
        assert node.parent is not None
        parent = node.parent
        key = self.hashes.get(node)
        if key is None:
            key = self.hashes[node] = self._hash(node)
        tokens = array("i", node.key).tolist()
        if self._leaf is parent and isinstance(last := self._events[-1], Stored) and last.medium == medium:
            last.block_hashes.append(key)
            last.token_ids += tokens
            if last.extra_keys is not None:
                last.extra_keys.append(None)
        else:
            namespace = parent.key if parent.parent is None else b""
            self._events.append(
                Stored(
                    [key],
                    self.hashes.get(parent),
                    tokens,
                    self._page_size,
                    None,
                    medium,
                    extra_keys=[[_digest(namespace)]] if namespace else None,
                )
            )
        self._leaf = node

    def removed(self, node: Node, medium: Medium) -> None:
        """`node` leaves the medium; called while its page is still set."""
        key = self.hashes[node]
        if not (node.page and node.host):
            del self.hashes[node]
        if self._events and isinstance(last := self._events[-1], Removed) and last.medium == medium:
            last.block_hashes.append(key)
        else:
            self._events.append(Removed([key], medium))
        self._leaf = None

    def cleared(self) -> None:
        """All pages are removed at once; events that have not been taken are dropped."""
        self.hashes.clear()
        self._events = [Cleared()]
        self._leaf = None

    def take(self) -> CacheEvents:
        """The events since the last call."""
        events = CacheEvents(self._next, self._events)
        self._next += 1
        self._events = []
        self._leaf = None
        return events

    def _hash(self, node: Node) -> int:
        """A hash of the page's tokens, all tokens before them and the namespace: the same on every server."""
        assert node.parent is not None
        if node.parent.parent is not None:
            above = self.hashes[node.parent].to_bytes(8, "big")
        # the key of a root is its namespace; its digest is longer than a hash, so that the two cannot collide
        else:
            above = blake2b(node.parent.key, digest_size=16).digest()
        return int.from_bytes(blake2b(node.key, digest_size=8, key=above).digest(), "big") & HASH_BITS


def _digest(namespace: bytes) -> str:
    """Names a namespace for readers, who must not see its name, which may be a secret."""
    return blake2b(namespace, digest_size=8).hexdigest()
