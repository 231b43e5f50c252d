"""KV cache groups: what some models store in addition to the keys and values of all tokens, in pools of their
own. Window pages (window.py) and states of recurrent layers (states.py) are the two.

A node of the prefix tree may have an entry of each group next to its page, and lives on without it. A prefix
that matches can be continued only at a depth where every group has the entries that the next token needs
(`usable`); tokens below are computed again. Unused entries are evicted when their pool is full: first those
that sequences merely passed, then *ends*, from which a sequence continued or could have: where sequences
part, or where one stopped.
"""

from collections.abc import Collection
from typing import Protocol

from runtime.cache.node import Node
from runtime.cache.pages import PagePool
from runtime.cache.sequence import Sequence


class NodeEntries(Protocol):
    """A pool, each of whose entries is free, owned by a node, or owned by one sequence."""

    kind: str  # name of an entry in messages
    # attribute of Node with the node's entry (0: none), and of Sequence with what it holds (None: nothing)
    # where sequences hold some
    field: str
    pool: PagePool

    def drop(self, node: Node) -> None:
        """Releases the entry of a node that no sequence uses."""
        ...


class CacheGroup(NodeEntries, Protocol):
    """Entries without which a sequence cannot continue."""

    def usable(self, node: Node) -> Node:
        """`node`, or the deepest node above it, from which a sequence can continue."""
        ...

    def start(self, sequence: Sequence, match: Node) -> None:
        """`sequence` was admitted and continues from `sequence.node`, a usable node at or above `match`, the
        deepest node that matches its tokens."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """The sequence stops running; its path in the tree is still locked."""
        ...


def usable(groups: Collection[CacheGroup], match: Node) -> Node:
    """`match`, or the deepest node above it, from which a sequence can continue in all groups."""
    node = None
    while groups and node is not match:
        node = match
        for group in groups:
            match = group.usable(match)
    return match


class EvictableNodes:
    """Nodes with an entry that no sequence uses, in the order of eviction."""

    __slots__ = ("_passed", "_ends")

    def __init__(self) -> None:
        self._passed: dict[Node, None] = {}  # not ends; the least recently used first
        self._ends: dict[Node, None] = {}  # ends, evicted after the others; the least recently used first

    def __len__(self) -> int:
        return len(self._passed) + len(self._ends)

    def __contains__(self, node: Node) -> bool:
        return node in self._passed or node in self._ends

    def is_end(self, node: Node) -> bool:
        """Whether a node, which is here, is an end."""
        return node in self._ends

    def add(self, node: Node, *, is_end: bool) -> None:
        """Adds a node as the most recently used one."""
        (self._ends if is_end else self._passed)[node] = None

    def remove(self, node: Node) -> None:
        """Removes a node, which must be here."""
        del (self._passed if node in self._passed else self._ends)[node]

    def next(self) -> Node:
        """The node to evict next; there must be one."""
        return next(iter(self._passed or self._ends))

    def first_but(self, held: set[int]) -> Node | None:
        """As `next`, but for nodes whose copy in host memory is held; None: there is no other."""
        return next(
            (node for nodes in (self._passed, self._ends) for node in nodes if node.host_state not in held),
            None,
        )
