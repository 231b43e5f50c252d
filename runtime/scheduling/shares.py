"""Fair shares: of the tenants with waiting sequences, the one that has got the least for its weight is next.

A tenant's clock counts the tokens computed for it, divided by its weight; a tenant that comes back from
idleness continues at the clock of the one that is furthest behind, so that it can neither save up nor be made
to pay. The idea is the virtual token counter of Sheng et al., 2024 (arXiv:2401.00588).
"""

from collections.abc import Mapping

MAX_TENANTS = 1024  # clocks that are kept of tenants without sequences


class Shares:
    """Clocks by tenant. With `is_on` False all tenants are one and the same, and nothing is counted."""

    def __init__(self, *, is_on: bool = False, weights: Mapping[str, float] | None = None) -> None:
        self.is_on = is_on
        self.tokens: dict[str, int] = {}  # computed since the tenant's clock is kept
        self._weights = dict(weights or {})
        self._clocks: dict[str, float] = {}
        self._live: dict[str, int] = {}  # sequences that wait or run
        self._decoding: dict[str, int] = {}  # sequences that decode

    def tenant(self, name: str) -> str:
        """The name under which a tenant's sequences are ordered."""
        return name if self.is_on else ""

    def clock(self, tenant: str) -> float:
        """Tokens computed for the tenant, divided by its weight."""
        return self._clocks.get(tenant, 0.0)

    def join(self, tenant: str, count: int) -> None:
        """`count` sequences of the tenant wait from now on."""
        if not self.is_on:
            return
        if tenant not in self._live:
            behind = min((self._clocks[other] for other in self._live), default=0.0)
            self._clocks[tenant] = max(self._clocks.get(tenant, 0.0), behind)
            self.tokens.setdefault(tenant, 0)
        self._live[tenant] = self._live.get(tenant, 0) + count

    def leave(self, tenant: str) -> None:
        """One of its sequences has ended."""
        if not self.is_on:
            return
        _subtract(self._live, tenant)
        if tenant not in self._live:
            self._forget()

    def start(self, tenant: str) -> None:
        """One of its sequences decodes from now on."""
        if self.is_on:
            self._decoding[tenant] = self._decoding.get(tenant, 0) + 1

    def stop(self, tenant: str) -> None:
        """One of its sequences does not decode any more."""
        if self.is_on:
            _subtract(self._decoding, tenant)

    def charge(self, tenant: str, tokens: int) -> None:
        """Tokens are computed for the tenant."""
        if self.is_on:
            self._clocks[tenant] += tokens / self._weights.get(tenant, 1.0)
            self.tokens[tenant] += tokens

    def charge_decodes(self) -> None:
        """A step gives each decoding sequence a token."""
        for tenant, count in self._decoding.items():
            self.charge(tenant, count)

    def _forget(self) -> None:
        """Clocks that change nothing any more, and the ones furthest behind when there are too many."""
        if not self._live:  # no tenant waits for another
            self._clocks.clear()
        if len(self.tokens) > 2 * MAX_TENANTS:
            idle = sorted((name for name in self.tokens if name not in self._live), key=self.clock)
            for name in idle[: len(self.tokens) - MAX_TENANTS]:
                self._clocks.pop(name, None)
                del self.tokens[name]


def _subtract(counts: dict[str, int], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
