"""Interface of profiles of a rank. Torch-free."""

from collections.abc import Callable
from typing import Protocol

from runtime.messages.ranks import Profile


class Recording(Protocol):
    """A profile that records from its creation until `write`."""

    def write(self) -> None:
        """Ends the profile and writes it. Raises OSError."""
        ...


RecordProfile = Callable[[Profile, int], Recording]  # begins a profile of the rank of this number
