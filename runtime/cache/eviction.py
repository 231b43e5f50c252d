"""Eviction policies, and the queues of nodes in the order of their eviction.

A parent is used at least as often and as recently as its children, so every policy evicts leaves first, and
no page becomes unreachable.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

from runtime.cache.node import Node

Priority: TypeAlias = tuple[int, ...]  # the smallest is evicted first


def recency(node: Node) -> Priority:
    """Least recently used first."""
    return (node.last_used,)


def frequency(node: Node) -> Priority:
    """Least often used first."""
    return node.hits, node.last_used


POLICIES: dict[str, Callable[[Node], Priority]] = {"lru": recency, "lfu": frequency}


def can_leave_device(node: Node) -> bool:
    """Whether the node's device page can be evicted."""
    return node.page != 0 and not node.locks and not node.num_device_children


def can_leave_host(node: Node) -> bool:
    """Whether the node's host page can be evicted."""
    return node.host != 0 and not node.pins and not node.num_host_children


class EvictionQueue:
    """Nodes in the order of their eviction. Entries may be stale: a node that was used since is moved back
    only when its turn comes.

    A change that makes `can_leave` true for a node must be followed by `offer`; a change that makes it false
    needs nothing.
    """

    def __init__(self, policy: str, can_leave: Callable[[Node], bool], bit: int) -> None:
        self._key = POLICIES[policy]
        self._can_leave = can_leave
        self._bit = bit  # this queue's bit of Node.queued
        self._heap: list[tuple[Priority, int, Node]] = []  # priority, tie-breaker, node
        self._ties = count()

    def offer(self, node: Node) -> None:
        """Adds the node if it can leave and is not in the queue."""
        if not node.queued & self._bit and self._can_leave(node):
            node.queued |= self._bit
            heappush(self._heap, (self._key(node), next(self._ties), node))

    def pop(self) -> Node | None:
        """Removes and returns the node to evict next; None if none can leave."""
        while self._heap:
            key, _, node = heappop(self._heap)
            node.queued &= ~self._bit
            if not self._can_leave(node):
                continue
            if self._key(node) == key:
                return node
            self.offer(node)  # used since it was queued
        return None
