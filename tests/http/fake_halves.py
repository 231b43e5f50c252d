"""Controls of halves that remember what they were told."""

from collections.abc import Callable
from typing import Literal

from runtime.messages.transfer import Role


class FakeHalves:
    """See HalfControls in service.py."""

    def __init__(self, record: Callable[[object], None]) -> None:
        self._record = record

    async def change(self, mode: Literal["prefill", "decode"]) -> Role:
        self._record(("role", mode))
        return Role(mode, 8998)


class WithHalves:
    """Controls with halves."""

    def record(self, call: object) -> None:
        raise NotImplementedError

    @property
    def halves(self) -> FakeHalves:
        return FakeHalves(self.record)
