"""Work that is done while a collective is under way."""

from collections.abc import Callable

from torch import Tensor

from runtime.devices.base import Collectives


class Meanwhile:
    """A computation, without collectives of its own, during the next collective of these ranks."""

    def __init__(self, ranks: Collectives, compute: Callable[[], Tensor]) -> None:
        self._ranks, self._compute = ranks, compute
        self._out: Tensor | None = None
        self._before = ranks.meanwhile
        ranks.meanwhile = self._run

    def __call__(self) -> Tensor:
        """The result."""
        assert self._out is not None, "no collective since it was to be computed during one"
        return self._out

    def _run(self) -> None:
        self._ranks.meanwhile = self._before
        self._out = self._compute()
