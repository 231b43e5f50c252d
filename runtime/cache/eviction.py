"""Who goes when room is needed: the policies, as a table, and the queue that serves them.

A parent is used at least as often and as late as its children, so leaves go first by whatever policy, and no
page is stranded.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

from runtime.cache.node import Node


def recency(node: Node) -> int:
    return node.last_used


def frequency(node: Node) -> tuple[int, int]:
    return node.hits, node.last_used


POLICIES: dict[str, Callable[[Node], Any]] = {"lru": recency, "lfu": frequency}  # the smallest goes first


def can_leave_device(node: Node) -> bool:
    return node.page != 0 and not node.locks and not node.num_resident


def can_leave_host(node: Node) -> bool:
    return node.host != 0 and not node.pins and not node.num_hosted


class EvictionQueue:
    """Nodes in the order in which they go. An entry may be stale: nodes that are used move back only when
    their turn comes.

    Whoever changes a node so that `can_leave` becomes true offers it; the other way round nothing needs to be
    done.
    """

    def __init__(self, policy: str, can_leave: Callable[[Node], bool], bit: int) -> None:
        self._key = POLICIES[policy]
        self._can_leave = can_leave
        self._bit = bit  # of Node.queued
        self._heap: list[tuple[Any, int, Node]] = []  # key, tie-breaker, node
        self._ties = count()

    def offer(self, node: Node) -> None:
        if not node.queued & self._bit and self._can_leave(node):
            node.queued |= self._bit
            heappush(self._heap, (self._key(node), next(self._ties), node))

    def pop(self) -> Node | None:
        """The next to go, no longer in the queue; None when nobody can."""
        while self._heap:
            key, _, node = heappop(self._heap)
            node.queued &= ~self._bit
            if not self._can_leave(node):
                continue
            if self._key(node) == key:
                return node
            self.offer(node)  # used since it was queued
        return None
