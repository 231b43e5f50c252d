"""The cache as seen by a storage tier behind host memory: which pages it may store, and how it returns them.

    confirmed()  ──► pages that are complete in host memory, pinned ──► read them ──► release()
    wanted()     ──► keys of the pages that a prompt still misses
    reserve()    ──► host pages to write them to ──► adopt(), which takes those into the tree that it needs

and for the states of recurrent layers confirmed_states(), reserve_state() and adopt_state(). A state has the
key of the page that it follows.

All of this runs in the event loop; reading and writing of the pages themselves need not. host.py explains why
it is safe. Pins and reservations refer to one host memory: after that was replaced (by ranks with another
number of host pages), returning them has no effect.
"""

from collections.abc import Callable
from hashlib import blake2b

from msgspec import Struct

from runtime.cache.groups import usable
from runtime.cache.host import HostTier
from runtime.cache.host_states import HostStates
from runtime.cache.kv import KVCache
from runtime.cache.node import Node
from runtime.cache.prefix import PrefixTree
from runtime.cache.sequence import Sequence

KEY_BYTES = 16


class Pin(Struct, frozen=True):
    """A page that keeps its place in host memory until `release` is called, once."""

    key: bytes
    host: int
    node: Node
    tree: PrefixTree

    @property
    def is_current(self) -> bool:
        """Whether the page is still in the tree. A pinned page can be read in any case, unless the host
        memory was replaced."""
        return not self.tree.is_closed and self.node.is_attached

    def release(self) -> None:
        """Unpins the page."""
        self.tree.unpin(self.node)


class StatePin(Struct, frozen=True):
    """The copy of a recurrent state in host memory, pinned while storage writes it."""

    key: bytes  # that of the page which the state follows
    host: int  # its place
    states: HostStates

    def release(self) -> None:
        """Unpins the copy."""
        self.states.places.unpin(self.host)


class ReservedState(Struct, frozen=True):
    """A place for a state that the storage tier owns until `adopt_state`."""

    place: int
    states: HostStates


class Reserved(Struct, frozen=True):
    """Host pages that the storage tier owns until `adopt`."""

    hosts: list[int]
    tier: HostTier


class Wanted(Struct, frozen=True):
    """The full pages of a prompt that neither device nor host memory has: pages `first`, `first` + 1, ... of
    the prompt, counted from 0. `passed`: keys of the pages before these behind which the prompt cannot be
    continued, because a state of recurrent layers is missing there."""

    first: int
    keys: list[bytes]
    passed: list[bytes] = []


class StorageConnector:
    """What a storage tier may do with the cache; `find` returns the cache that is in use. A page's key
    depends on `identity` (of model, weights and page layout), the namespace and all tokens so far."""

    def __init__(self, find: Callable[[], KVCache], identity: bytes) -> None:
        self._find = find
        self._seed = blake2b(identity).digest()

    @property
    def cache(self) -> KVCache:
        """The cache that is in use."""
        return self._find()

    def confirmed(self) -> list[Pin]:
        """Pins for pages whose saves have completed since the last call, except those evicted since."""
        nodes, self.cache.host.confirmed = self.cache.host.confirmed, []
        return [self.pin(node) for node in nodes if node.host and not node.save_step and node.is_attached]

    def pin(self, node: Node) -> Pin:
        """Pins a page that is in host memory (`Node.host` set): complete (`save_step` 0), or being saved."""
        node.pins += 1
        return Pin(self.key(node), node.host, node, self.cache.tree)

    def key(self, node: Node) -> bytes:
        """The key of a node's page, KEY_BYTES long."""
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

    def wanted(self, sequence: Sequence, *, has_next: bool = False) -> Wanted:
        """The pages that a waiting sequence misses and that storage may have. `has_next`: the token behind
        its known ones comes as well, so these need not be computed again, and the page of the last one is
        wanted if it is full."""
        cache, tokens = self.cache, sequence.tokens
        if not cache.shares or sequence.wants_prompt_logprobs:
            return Wanted(0, [])
        width, last = cache.page_size, (len(sequence.tokens) - 1) // cache.page_size
        node = sequence.match = cache.tree.probe(sequence.match, sequence.request.namespace, tokens, last)
        if node.depth == 0:
            node = Node(None, sequence.request.namespace.encode(), 0)  # the namespace may have no root yet
        first, digest, keys, passed = node.depth, self.key(node), list[bytes](), list[bytes]()
        ending = tokens[last * width :].tobytes()
        is_there = first == last and ending in node.children
        if has_next and len(tokens) == (last + 1) * width and not is_there and cache.states is None:
            last += 1
        end = usable(cache.groups, node)
        while node is not end and node.parent is not None:
            passed.append(self.key(node))
            node = node.parent
        for start in range(first * width, last * width, width):
            digest = _chain(digest, tokens[start : start + width].tobytes())
            keys.append(digest)
        return Wanted(first, keys, passed[::-1])

    def confirmed_states(self) -> list[StatePin]:
        """As `confirmed`, for copies of states."""
        if (states := self.cache.host.states) is None:
            return []
        return [StatePin(self.key(node), place, states) for node, place in states.pin_confirmed()]

    def reserve_state(self) -> ReservedState | None:
        """A place for a state; None: there is none."""
        states = self.cache.host.states
        return None if states is None or not (place := states.reserve()) else ReservedState(place, states)

    def adopt_state(self, sequence: Sequence, depth: int, reserved: ReservedState) -> bool:
        """Gives the state behind the first `depth` pages of the sequence's tokens to the tree; frees its
        place if the tree lacks these pages or has the state. `depth` 0: there is none. -> whether the tree
        took it"""
        if reserved.states is not self.cache.host.states:
            return False
        node = self.cache.tree.probe(None, sequence.request.namespace, sequence.tokens, depth)
        return reserved.states.adopt(node if 0 < depth == node.depth else None, reserved.place)

    def reserve(self, count: int) -> Reserved:
        """Up to `count` host pages, for which unused ones are evicted."""
        return Reserved(self.cache.host.reserve(count), self.cache.host)

    def adopt(self, sequence: Sequence, first: int, reserved: Reserved, count: int) -> int:
        """Takes the first `count` reserved pages into the tree, which hold pages `first`, `first` + 1, ... of
        the sequence's tokens, and frees the others. Returns how many pages the tree did not have before."""
        tree, namespace = self.cache.tree, sequence.request.namespace
        if reserved.tier is not self.cache.host:
            return 0
        reserved.tier.reserved.difference_update(reserved.hosts)
        tokens, width, spare = sequence.tokens, tree.page_size, list(reserved.hosts[count:])
        node = tree.probe(None, namespace, tokens, first) if first or not count else tree.enter(namespace)
        if node.depth < first:  # the pages before them were evicted meanwhile
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


def _chain(above: bytes, key: bytes) -> bytes:
    return blake2b(key, digest_size=KEY_BYTES, key=above).digest()
