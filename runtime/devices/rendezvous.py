"""How the ranks of one start report outcomes to each other without a collective.

A rank that fails within a forward pass leaves the others waiting in a collective that never completes, and
must not enter another one. So the ranks report to the key-value store at which they met, where no rank has to
be in step with the others, and learn from it whether all of them succeeded.
"""

from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from torch.distributed import Store

# for the reports of others after this rank has failed: they are close behind, unless they wait for it
FAILED_TIMEOUT_S = 10.0
# after this rank has succeeded: another rank may still compile, or has failed and this one is about to be
# ended
TIMEOUT_S = 3600.0


def open_store(rendezvous: str, rank: int, size: int) -> "Store":
    """The store at which the ranks of one start meet: a file that no earlier start has used, or, with ranks
    on several nodes, tcp://HOST:PORT/PREFIX?fd=N. Rank 0 then serves it on the socket that it has inherited
    as descriptor N, and all keys begin with the prefix, which only these ranks know."""
    from torch.distributed import FileStore, PrefixStore, TCPStore

    if not rendezvous.startswith("tcp:"):
        return FileStore(rendezvous, size)
    url = urlsplit(rendezvous)
    served = {"is_master": True, "master_listen_fd": int(parse_qs(url.query)["fd"][0])} if rank == 0 else {}
    store = TCPStore(str(url.hostname), int(url.port or 0), size, wait_for_workers=False, **served)
    return PrefixStore(url.path.removeprefix("/"), store)


class Stranded(RuntimeError):
    """This rank has failed while others wait for it in a collective: only new ranks can go on."""


class Rendezvous:
    """Reports of the ranks of one start, by way of the `store` that all of them share."""

    def __init__(self, store: "Store", rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._count = 0

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
