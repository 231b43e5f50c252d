"""How many bytes of request bodies the server holds at once, of all its clients together.

A body counts from its first byte until its request has ended: what it says (prompts, images) lives as long.
"""

from runtime.errors import Unavailable

LEASE = "runtime.body_lease"  # scope key of the request's BodyLease


class BodyBudget:
    """The bytes that request bodies may take in all."""

    __slots__ = ("max_bytes", "num_bytes", "peak_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # held at present
        self.peak_bytes = 0  # most that were ever held


class BodyLease:
    """The part of a budget that one request holds."""

    __slots__ = ("budget", "num_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self.budget = budget
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Takes so many bytes more. Raises Unavailable, and then holds none."""
        budget = self.budget
        if budget.num_bytes + num_bytes > budget.max_bytes:
            self.release()
            raise Unavailable(
                f"the bodies of all requests together have over {budget.max_bytes} bytes, the most that this "
                "server holds at once (--max-total-body-bytes); send this request again in a moment"
            )
        self.num_bytes += num_bytes
        budget.num_bytes += num_bytes
        budget.peak_bytes = max(budget.peak_bytes, budget.num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Holds so many bytes in all from now on. Raises Unavailable, and then holds none."""
        self.add(num_bytes - self.num_bytes)

    def release(self) -> None:
        """Gives everything back."""
        self.budget.num_bytes -= self.num_bytes
        self.num_bytes = 0
