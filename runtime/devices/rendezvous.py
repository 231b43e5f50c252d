"""Where ranks tell each other what came of something, beside the exchanges of their model.

A rank that fails in the midst of a forward pass leaves the others waiting in an exchange, and would leave
them for ever: whatever it exchanges next is not what they wait for. So it says what happened where nobody
needs to be in step, in the store by which the ranks have met, and finds out in a moment whether the others
are well.
"""

from datetime import timedelta
from typing import Any

# of a rank that has failed, for the others to say anything: they are not much behind it, unless they wait for
# it
PATIENCE_S = 10.0
# of one that is well: another may still compile what this one has; or has failed, and this one is going to be
# ended
LONG_S = 3600.0


class Stranded(RuntimeError):
    """This rank has failed, and others wait for it in an exchange: only new ranks can go on."""


class Rendezvous:
    """`store`: torch.distributed's, which all ranks have."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._count = 0

    def outcomes(self, mine: str) -> list[str]:
        """What every rank says; all call it alike, when the device has done all before it, with "" or the
        error. Raises Stranded."""
        self._count += 1
        keys = [f"outcome/{self._count}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], mine)
        try:
            self._store.wait(keys, timedelta(seconds=PATIENCE_S if mine else LONG_S))
        except RuntimeError as error:  # torch has no class of its own for it in all versions
            raise Stranded(
                f"{mine}; another rank has said nothing since and may wait for this one"
            ) from error
        return [self._store.get(key).decode() for key in keys]
