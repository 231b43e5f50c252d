"""Which feed-forward a layer of a decoder has."""

import torch

from runtime.devices.base import Device
from runtime.layers.feed_forward import FeedForward, PlainFeedForward
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.moe.plain_experts import PlainExperts
from runtime.models.config.model_config import ModelConfig
from runtime.models.self_attention import reduction_of

FeedForwards = FeedForward | PlainFeedForward | SparseFeedForward | PlainExperts


def feed_forward(device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> FeedForwards:
    """The feed-forward of a layer, with experts or without."""
    limit = config.limits[index] if config.limits else 0.0
    if config.moe is not None and config.moe.layers[index]:
        if config.moe.is_gated and not config.moe.limit_of(index):
            return SparseFeedForward(device, dtype, config.hidden_size, config.moe, shared_limit=limit)
        return PlainExperts(
            device, dtype, config.hidden_size, config.moe, config.moe.limit_of(index), shared_limit=limit
        )
    sizes = config.hidden_size, config.intermediate_size
    bias, reduction = config.mlp_bias, reduction_of(device)
    if device.has_groups:  # LlamaDecoderLayer adds up what each group needs
        reduction = "all_reduce" if bias else "none"
    if not config.is_gated:
        return PlainFeedForward(device, dtype, *sizes, config.activation, bias=bias, reduction=reduction)
    assert config.activation == "silu" or config.activation == "gelu_tanh", "read_config refuses others"
    return FeedForward(
        device,
        dtype,
        *sizes,
        bias=bias,
        reduction=reduction,
        replicated=device.replicates_dense,
        activation=config.activation,
        limit=limit,
    )
