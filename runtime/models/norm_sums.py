"""Sums over ranks that are left to the norms behind them, where the device has one launch for both."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, runtime_checkable

from runtime.devices.base import Collectives, Device
from runtime.layers.feed_forward import FeedForward
from runtime.layers.fused_ops import fused_ops_of
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.weight import Layer
from runtime.models.config.model_config import ModelConfig


@runtime_checkable
class SummedLayer(Protocol):
    """What `leave_sums_to_norms` needs of a layer: the ranks whose parts the norm behind its attention sums, and
    those whose parts its first norm does; None: what is given them is whole."""

    mlp: Layer
    norm_ranks: Collectives | None
    input_ranks: Collectives | None


def norm_ranks(device: Device, config: ModelConfig, mlp: Layer) -> Collectives | None:
    """The ranks of which norms of a layer sum parts: each norm is given what a product made as it is, and
    nothing else reads that. None: products sum."""
    ranks, takes = device.collectives, fused_ops_of(device).sums_ranks
    is_plain = config.placement == "pre" and config.norm == "rms" and config.residual_scale == 1.0
    has_bias = config.o_bias or config.mlp_bias
    is_known = type(mlp) in (FeedForward, SparseFeedForward) and not has_bias
    is_divided = device.has_groups or device.scatters_tokens or device.prompt_split is not None
    is_apart = device.replicates_dense or device.all_to_all is not None or device.head_ranks is not ranks
    is_whole = not (is_divided or is_apart) and ranks.size > 1
    return ranks if takes and is_plain and is_known and is_whole else None


def leave_sums_to_norms(layers: Sequence[object], aux_layers: Sequence[int]) -> None:
    """Lets feed-forwards leave their sums to the first norm of the layer behind them. `aux_layers`: places of
    layers whose inputs are read elsewhere too."""
    for index, (before, layer) in enumerate(pairwise(layers), 1):
        if index in aux_layers or not isinstance(before, SummedLayer) or not isinstance(layer, SummedLayer):
            continue
        if before.norm_ranks is not None and layer.norm_ranks is not None:
            assert isinstance(before.mlp, FeedForward | SparseFeedForward), "see norm_ranks"
            before.mlp.leave_sum()
            layer.input_ranks = layer.norm_ranks
