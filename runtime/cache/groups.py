"""What some models keep beside keys and values of all tokens, in pools of their own: window pages (window.py)
and states (states.py).

Both rest on one idea. A node of the tree keeps such a thing beside its page as long as there is room, and
lives on without. So a prefix that is found can be continued only at a depth where what its continuation needs
is there (`usable`), and from there on its tokens are computed anew. What nobody uses goes when room is
needed: first what sequences merely passed, then the *ends*, from which one went on or could have: where
sequences part, or one stopped.
"""

from collections.abc import Collection
from typing import Protocol

from runtime.cache.node import Node
from runtime.cache.pages import PagePool
from runtime.scheduling.sequence import Sequence


class CacheGroup(Protocol):
    """A pool whose every entry is free, a node's, or one sequence's own."""

    kind: str  # of its entries, in words
    # of nodes: their entry, 0: none; of sequences: what they hold, with its entries in `own`, or None
    field: str
    pool: PagePool

    def usable(self, node: Node) -> Node:
        """`node`, or the deepest one above it, from which a sequence can go on."""
        ...

    def start(self, sequence: Sequence, match: Node) -> None:
        """`sequence` was admitted at a usable node, at or above what was found of its tokens."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """The sequence stops running; its path in the tree is still locked."""
        ...

    def drop(self, node: Node) -> None:
        """A node that keeps an entry, and that nobody uses, leaves the tree."""
        ...


def usable(groups: Collection[CacheGroup], match: Node) -> Node:
    """`match`, or the deepest node above it, from which a sequence can go on in every respect."""
    node = None
    while groups and node is not match:
        node = match
        for side in groups:
            match = side.usable(match)
    return match


class Idle:
    """Nodes with an entry that nobody uses, in the order in which they give it up."""

    __slots__ = ("_passed", "_ends")

    def __init__(self) -> None:
        self._passed: dict[Node, None] = {}  # the least recently used first
        self._ends: dict[Node, None] = {}  # the same; these go later

    def __len__(self) -> int:
        return len(self._passed) + len(self._ends)

    def __contains__(self, node: Node) -> bool:
        return node in self._passed or node in self._ends

    def add(self, node: Node, *, is_end: bool) -> None:
        (self._ends if is_end else self._passed)[node] = None

    def remove(self, node: Node) -> None:
        del (self._passed if node in self._passed else self._ends)[node]

    def next(self) -> Node:
        """Who goes first; there is one."""
        return next(iter(self._passed or self._ends))
