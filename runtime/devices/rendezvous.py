"""How the ranks of one start report outcomes to each other without a collective.

A rank that fails within a forward pass leaves the others waiting in a collective that never completes, and
must not enter another one. So the ranks report to the key-value store at which they met, where no rank has to
be in step with the others, and learn from it whether all of them succeeded.
"""

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

# for the reports of others after this rank has failed: they are close behind, unless they wait for it
FAILED_TIMEOUT_S = 10.0
# after this rank has succeeded: another rank may still compile, or has failed and this one is about to be
# ended
TIMEOUT_S = 3600.0
# for the other ranks of a start to come: they are started together, and import torch
MEET_TIMEOUT_S = 300.0


class Absent(RuntimeError):
    """Other ranks of this start did not come: only new ranks can go on."""


class Stranded(RuntimeError):
    """This rank has failed while others wait for it in a collective: only new ranks can go on."""


class Rendezvous:
    """Reports of the ranks of one start, by way of the `store` that all of them share."""

    def __init__(self, store: "Store", rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._count = 0

    def meet(self, timeout_s: float = MEET_TIMEOUT_S) -> None:
        """Waits until all ranks are at the store, before the library of their collectives does, whose limits
        are long and whose errors name no rank. Raises Absent."""
        keys = [f"here/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], "")
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError as error:  # not all versions of torch have a class for this error
            absent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise Absent(
                f"rank {', '.join(absent)} of {self._size} did not come within {timeout_s:g} s; its own log "
                "says why, or it cannot reach this machine"
            ) from error

    def outcomes(self, mine: str) -> list[str]:
        """The outcome of every rank, "" or an error. All ranks call it equally often, when their devices have
        done all work before. Raises Stranded."""
        self._count += 1
        keys = [f"outcome/{self._count}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], mine)
        try:
            self._store.wait(keys, timedelta(seconds=FAILED_TIMEOUT_S if mine else TIMEOUT_S))
        except RuntimeError as error:  # not all versions of torch have a class for this error
            raise Stranded(
                f"{mine}; another rank has reported nothing since and may wait for this one"
            ) from error
        return [self._store.get(key).decode() for key in keys]
