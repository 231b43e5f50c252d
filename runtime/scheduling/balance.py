"""Which replica gets a request: a pure function of what is open on each, and of what its prefix cache has.

A request weighs its prompt's tokens and those of the answer that is expected of it: the mean length of
answers so far, at most `max_new_tokens`, for each of its `n` sequences. The weight stays until it ends.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from runtime.cache.media_keys import cache_ids
from runtime.messages.balance import BalanceMethod
from runtime.messages.requests import Request

# a prefix draws a request to a replica with at most so much more open than the least: a factor, and tokens
SLACK_FACTOR, SLACK_TOKENS = 1.5, 4096
# a prompt that begins like a recent one goes where that one went, before anything of it is cached
HEAD_TOKENS = 64
MAX_HEADS = 4096  # recent prompts that are remembered so
# the mean length of answers begins as if there had been so many, of so many tokens
FIRST_ANSWERS, FIRST_TOKENS = 8, 128


class ReplicaView(Protocol):
    """What balancing asks of a replica."""

    @property
    def is_taking(self) -> bool:
        """Whether its ranks run: none is while they start or are started again."""
        ...

    @property
    def answers(self) -> tuple[int, int]:
        """Tokens of answers that it has generated, and the number of answers that have ended."""
        ...

    def cached_len(self, request: Request) -> int:
        """Tokens of the prompt that its prefix cache has, in whole pages."""
        ...


class Held(Struct):
    """What is open on a replica."""

    requests: int = 0
    tokens: int = 0


class Balance:
    """Chooses replicas by one method, and keeps count of what is open on each."""

    def __init__(self, method: BalanceMethod, num_replicas: int) -> None:
        self.held = [Held() for _ in range(num_replicas)]
        self._choose = METHODS[method]
        self._open: dict[str, tuple[int, int]] = {}  # by request id: its replica, and what it weighs
        self._turn = 0  # of round robin
        # by how recent prompts begin: where the last of them went
        self._heads: OrderedDict[tuple[str, bytes], int] = OrderedDict()

    def choose(self, request: Request, views: Sequence[ReplicaView]) -> int:
        """The replica that gets the request, which is open there from now on. Replicas that take none get one
        only where no other does."""
        taking = [index for index, view in enumerate(views) if view.is_taking] or list(range(len(views)))
        if request.replica is not None:
            index = request.replica
        elif len(taking) == 1:
            index = taking[0]
        else:
            index = self._choose(self, request, taking, views)
        self._turn = index + 1
        if len(views) > 1 and (head := _head(request)) is not None:
            self._heads[head] = index
            self._heads.move_to_end(head)
            if len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
        self._add(request.id, index, weight(request, views))
        return index

    def replica(self, request_id: str) -> int | None:
        """Where an open request is; None: it is not open."""
        found = self._open.get(request_id)
        return None if found is None else found[0]

    def move(self, request_id: str, index: int) -> None:
        """An open request goes to another replica."""
        _, weight = self._open[request_id]
        self.close(request_id)
        self._add(request_id, index, weight)

    def close(self, request_id: str) -> None:
        """A request has ended; one that is not open is ignored."""
        if (found := self._open.pop(request_id, None)) is not None:
            held = self.held[found[0]]
            held.requests -= 1
            held.tokens -= found[1]

    def _add(self, request_id: str, index: int, weight: int) -> None:
        self._open[request_id] = index, weight
        self.held[index].requests += 1
        self.held[index].tokens += weight

    # ── methods: of a request, the replicas that take requests, and the views of all ────────────────────────

    def _round_robin(self, request: Request, taking: list[int], views: Sequence[ReplicaView]) -> int:
        return next((index for index in taking if index >= self._turn), taking[0])

    def _follow_bootstrap_room(
        self, request: Request, taking: list[int], views: Sequence[ReplicaView]
    ) -> int:
        """The one that the request's room names, an id which a router gives to both halves of a request; in
        turn where there is no room, or that replica takes none."""
        index = -1 if request.transfer is None else request.transfer.room % len(views)
        return index if index in taking else self._round_robin(request, taking, views)

    def _total_requests(self, request: Request, taking: list[int], views: Sequence[ReplicaView]) -> int:
        return min(taking, key=lambda index: self.held[index].requests)

    def _total_tokens(self, request: Request, taking: list[int], views: Sequence[ReplicaView]) -> int:
        return min(taking, key=lambda index: (self.held[index].tokens, self.held[index].requests))

    def _prefix_aware(self, request: Request, taking: list[int], views: Sequence[ReplicaView]) -> int:
        """The one with the longest cached prefix, of those that have not much more open than the least."""
        least = min(self.held[index].tokens for index in taking)
        near = [i for i in taking if self.held[i].tokens <= least * SLACK_FACTOR + SLACK_TOKENS]
        head = _head(request)
        recent = None if head is None else self._heads.get(head)
        found = {i: max(views[i].cached_len(request), HEAD_TOKENS * (i == recent)) for i in near}
        return min(near, key=lambda i: (-found[i], self.held[i].tokens, self.held[i].requests))


METHODS: dict[BalanceMethod, Callable[[Balance, Request, list[int], Sequence[ReplicaView]], int]] = {
    "round_robin": Balance._round_robin,
    "follow_bootstrap_room": Balance._follow_bootstrap_room,
    "total_requests": Balance._total_requests,
    "total_tokens": Balance._total_tokens,
    "prefix_aware": Balance._prefix_aware,
}


def weight(request: Request, views: Sequence[ReplicaView]) -> int:
    """What a request weighs, in tokens."""
    tokens = FIRST_ANSWERS * FIRST_TOKENS + sum(view.answers[0] for view in views)
    answer = tokens / (FIRST_ANSWERS + sum(view.answers[1] for view in views))
    most = request.params.max_new_tokens
    return len(request.prompt_ids) + round(request.params.n * (answer if most is None else min(most, answer)))


def _head(request: Request) -> tuple[str, bytes] | None:
    """How the prompt begins, within its namespace of the prefix cache; None: it is short."""
    if len(request.prompt_ids) < HEAD_TOKENS:
        return None
    return request.namespace, cache_ids(request)[:HEAD_TOKENS].tobytes()
