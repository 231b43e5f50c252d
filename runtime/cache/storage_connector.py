"""The cache as a tier behind host memory sees it: which pages it may keep, and how it gives them back.

    confirmed()  ──► pages that are in host memory for certain, pinned ──► read them ──► release()
    wanted()     ──► keys of the pages that a prompt still misses
    reserve()    ──► host pages to write them to ──► adopt(), which returns what the tree has no use for

All of it runs in the event loop; reading and writing of the pages themselves need not. Why that is exact
stands in host.py. Pins and reservations remember which host memory they are of: what comes back after it was
replaced (ranks with another number of host pages) changes nothing any more.
"""

from collections.abc import Callable
from hashlib import blake2b

from msgspec import Struct

from runtime.cache.host import HostTier
from runtime.cache.kv import KVCache
from runtime.cache.node import Node
from runtime.cache.prefix import PrefixTree
from runtime.scheduling.sequence import Sequence

KEY_BYTES = 16


class Pin(Struct, frozen=True):
    """A page that stays where it is in host memory until it is released, once."""

    key: bytes
    host: int
    node: Node
    tree: PrefixTree

    @property
    def is_current(self) -> bool:
        """Whether the page can be found and holds what it should. While it is pinned it can be read all the
        same, unless the ranks have come again with another host memory."""
        return not self.tree.is_closed and self.node.is_attached

    def release(self) -> None:
        self.tree.unpin(self.node)


class Reserved(Struct, frozen=True):
    """Host pages of nobody else."""

    hosts: list[int]
    tier: HostTier


class Wanted(Struct, frozen=True):
    """The full pages of a prompt that neither device nor host memory has: the first is page `first` of the
    prompt, from 0."""

    first: int
    keys: list[bytes]


class StorageConnector:
    """Doors for a storage tier; `find` gives the cache that is in use now. A page's key depends on `identity`
    (of model, weights and the form of a page), the namespace and all tokens so far."""

    def __init__(self, find: Callable[[], KVCache], identity: bytes) -> None:
        self._find = find
        self._seed = blake2b(identity).digest()

    @property
    def cache(self) -> KVCache:
        return self._find()

    def confirmed(self) -> list[Pin]:
        """Pages whose content has got to host memory since the last call, those that were given up again left
        out."""
        nodes, self.cache.host.confirmed = self.cache.host.confirmed, []
        return [self.pin(node) for node in nodes if node.host and not node.save_step and node.is_attached]

    def pin(self, node: Node) -> Pin:
        """For a page that is in host memory for certain (`Node.host` set, `save_step` 0)."""
        node.pins += 1
        return Pin(self.key(node), node.host, node, self.cache.tree)

    def key(self, node: Node) -> bytes:
        """Names the content of a node's page."""
        path = []
        while not node.digest and node.parent is not None:
            path.append(node)
            node = node.parent
        if not node.digest:
            node.digest = blake2b(node.key, digest_size=KEY_BYTES, key=self._seed).digest()
        digest = node.digest
        for below in reversed(path):
            digest = below.digest = _chain(digest, below.key)
        return digest

    def wanted(self, sequence: Sequence) -> Wanted:
        """What a waiting sequence would have to compute though its pages may be known elsewhere."""
        cache, tokens = self.cache, memoryview(sequence.tokens).cast("B")
        if not cache.shares or sequence.wants_prompt_logprobs:
            return Wanted(0, [])
        width, last = 4 * cache.page_size, (len(sequence.tokens) - 1) // cache.page_size
        node = sequence.match = cache.tree.probe(sequence.match, sequence.request.namespace, tokens, last)
        if node.depth == 0:
            node = Node(None, sequence.request.namespace.encode(), 0)  # the namespace may have no root yet
        first, digest, keys = node.depth, self.key(node), []
        for start in range(first * width, last * width, width):
            digest = _chain(digest, tokens[start : start + width])
            keys.append(digest)
        return Wanted(first, keys)

    def reserve(self, count: int) -> Reserved:
        """Up to `count` host pages, for which others that nobody uses give way."""
        return Reserved(self.cache.host.reserve(count), self.cache.host)

    def adopt(self, sequence: Sequence, first: int, reserved: Reserved, count: int) -> int:
        """The first `count` of the reserved pages hold pages `first`, `first` + 1, ... of the sequence's
        tokens; all others come back. -> how many pages the tree has now that it had not"""
        tree, namespace = self.cache.tree, sequence.request.namespace
        if reserved.tier is not self.cache.host:
            return 0
        reserved.tier.reserved.difference_update(reserved.hosts)
        tokens, width, spare = (
            memoryview(sequence.tokens).cast("B"),
            4 * tree.page_size,
            list(reserved.hosts[count:]),
        )
        node = tree.probe(None, namespace, tokens, first) if first or not count else tree.enter(namespace)
        if node.depth < first:  # evicted meanwhile
            count, spare = 0, list(reserved.hosts)
        now = next(tree.clock)
        for row, host in enumerate(reserved.hosts[:count], first):
            node = node.child(tokens[row * width : (row + 1) * width].tobytes())
            if node.host:
                spare.append(host)
            else:
                node.last_used = max(node.last_used, now)
                tree.put_host(node, host)
        tree.hosts.release(spare)
        adopted = len(reserved.hosts) - len(spare)
        sequence.fetched_len += adopted * tree.page_size
        return adopted


def _chain(above: bytes, key: bytes | memoryview) -> bytes:
    return blake2b(key, digest_size=KEY_BYTES, key=above).digest()
