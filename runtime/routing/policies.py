"""How a server is chosen for a request, by the names of SGLang's router. Pure: no clocks, no tasks."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from msgspec import Struct

from runtime.routing.prefix_index import PrefixIndex, keys_of
from runtime.routing.worker import Worker


class PolicySettings(Struct, frozen=True, kw_only=True):
    """Limits of the policy cache_aware."""

    cache_threshold: float = 0.3  # share of the text that must be known for the server that knows it
    balance_abs_threshold: int = 64  # requests between the most and the least loaded server, and
    balance_rel_threshold: float = 1.5  # their ratio, above both of which the least loaded one is taken
    max_tree_size: int = 2**18  # blocks of 64 bytes


class Policy(Protocol):
    """A way to choose."""

    def choose(self, workers: Sequence[Worker], text: bytes) -> Worker:
        """One of `workers`, which are not empty, for a request whose prompt is `text`."""
        ...

    def forget(self, worker: Worker) -> None:
        """A server has gone, and its cache with it."""
        ...


class _Stateless:
    """A policy that looks at the servers alone."""

    def __init__(self, pick: Callable[[Sequence[Worker]], Worker]) -> None:
        self._pick = pick

    def choose(self, workers: Sequence[Worker], text: bytes) -> Worker:
        return self._pick(workers)

    def forget(self, worker: Worker) -> None:
        """Nothing is remembered of servers."""


class _RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._count = 0

    def choose(self, workers: Sequence[Worker], text: bytes) -> Worker:
        self._count += 1
        return workers[(self._count - 1) % len(workers)]

    def forget(self, worker: Worker) -> None:
        """Nothing is remembered of servers."""


class _CacheAware:
    """The server that was sent the longest beginning of the prompt; the least loaded one when no server
    knows enough of it, or when loads differ too much."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._index = PrefixIndex(settings.max_tree_size)

    def choose(self, workers: Sequence[Worker], text: bytes) -> Worker:
        chosen, keys = least_loaded(workers), keys_of(text)
        if not self._is_imbalanced(workers):
            by_url = {worker.url: worker for worker in workers}
            url, share = self._index.match(keys, by_url)
            if url is not None and share > self._settings.cache_threshold:
                chosen = by_url[url]
        self._index.insert(keys, chosen.url)
        return chosen

    def forget(self, worker: Worker) -> None:
        self._index.remove(worker.url)

    def _is_imbalanced(self, workers: Sequence[Worker]) -> bool:
        loads = [worker.load for worker in workers]
        most, least = max(loads), min(loads)
        return (
            most - least > self._settings.balance_abs_threshold
            and most > least * self._settings.balance_rel_threshold
        )


def least_loaded(workers: Sequence[Worker]) -> Worker:
    """The server with the fewest requests of this router."""
    return min(workers, key=lambda worker: worker.load)


def _power_of_two(random: Random) -> Callable[[Sequence[Worker]], Worker]:
    return lambda workers: least_loaded(random.sample(workers, min(2, len(workers))))


POLICIES: dict[str, Callable[[PolicySettings, Random], Policy]] = {
    "cache_aware": lambda settings, random: _CacheAware(settings),
    "round_robin": lambda settings, random: _RoundRobin(),
    "random": lambda settings, random: _Stateless(random.choice),
    "power_of_two": lambda settings, random: _Stateless(_power_of_two(random)),
    "least_load": lambda settings, random: _Stateless(least_loaded),
}
