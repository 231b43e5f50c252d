"""Mixtures of experts are not here yet: options/rules.py refuses such models for this device before a rank starts."""

from torch import Tensor

from runtime.models.sparse import Routing


class NoExperts:
    """See devices/base.py."""

    def route(self, logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("experts on npu")

    def pack(self, gate_up: Tensor, down: Tensor) -> None:
        raise NotImplementedError("experts on npu")

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: None) -> Tensor:
        raise NotImplementedError("experts on npu")
