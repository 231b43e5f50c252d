"""What attention in torch needs of a device's plan, for layers whose attention no device has a kernel for."""

from typing import Protocol, runtime_checkable

from runtime.layers.attention import sdpa


@runtime_checkable
class GatheredPlan(Protocol):
    """An AttentionPlan that knows where the keys of a step's rows are, of devices with
    DeviceFacts.gathers_rows."""

    @property
    def gathered(self) -> sdpa.AttentionPlan:
        """The plan of attention in torch."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of the longest row's slot, with those of this step."""
        ...
