"""Moves experts of a mixture-of-experts model from rank to rank while the rank takes steps.

    ReadExperts   in a thread: the weights of experts that come to this rank are read from the checkpoint
    MoveExperts   between two steps: they are packed, and brought to their places

All ranks move between the same two steps, so that each token finds its experts. In between, a layer needs
memory for the experts that come to it twice.
"""

from collections.abc import Callable

import torch

from runtime.errors import ModelError
from runtime.layers.moe.expert_weights import ExpertWeights
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.messages.experts import Placement
from runtime.models.base import Model
from runtime.ranks.memory_saver import MemorySaver

# a layer's placement, and the weights of experts that it brings to this rank; None: there are none
Arrival = tuple[Placement, ExpertWeights | None]


class ExpertPlacer:
    """Moves of one rank's experts."""

    def __init__(self, memory: MemorySaver) -> None:
        """`memory` has the model and its loader, which may be replaced."""
        self.memory = memory
        self.model: Model | None = None  # whose weights were read
        self.arrived: dict[int, Arrival] = {}  # by index of the layer

    def reading(self, placements: dict[int, Placement]) -> Callable[[], None]:
        """-> what reads, in any thread, what `move` brings to its place, for the model of now. It raises
        ModelError, OSError, MemoryError; then nothing can be moved."""
        model, loader = self.memory.runner.model, self.memory.loader
        self.model, self.arrived = model, {}

        def read() -> None:
            if model is None:
                raise ModelError("the weights are released")
            arrived = dict[int, Arrival]()
            with torch.inference_mode():
                for index, placement in placements.items():
                    layer, weights = sparse_layer(model, index), None
                    if coming := layer.arriving(placement):
                        weights = layer.weights_of(coming)
                        loader.read_experts(model, f"layers.{index}.mlp.", weights)
                    arrived[index] = placement, weights
            self.arrived = arrived

        return read

    def move(self) -> None:
        """Brings what was read to its places. Raises ModelError where the model has other weights by now, as
        then all ranks do."""
        model, arrived, self.arrived = self.memory.runner.model, self.arrived, {}
        if model is None or model is not self.model:
            raise ModelError("the weights have changed meanwhile")
        for index, (placement, weights) in arrived.items():
            sparse_layer(model, index).move(placement, weights)
        self.memory.loader.move_experts({index: placement for index, (placement, _) in arrived.items()})


def sparse_layer(model: Model, index: int) -> SparseFeedForward:
    """The experts of a layer."""
    layer = getattr(model.layers[index], "mlp", None)
    assert isinstance(layer, SparseFeedForward), "only layers with experts have placements"
    return layer
