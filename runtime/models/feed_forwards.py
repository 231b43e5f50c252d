"""Which feed-forward a layer of a decoder has."""

import torch

from runtime.devices.base import Device
from runtime.layers.feed_forward import FeedForward, PlainFeedForward
from runtime.layers.linear import Reduction
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.moe.plain_experts import PlainExperts
from runtime.layers.parallel.group_tokens import SharedTokens
from runtime.layers.weight import Layer
from runtime.models.config.model_config import ModelConfig
from runtime.models.self_attention import reduction_of

FeedForwards = FeedForward | PlainFeedForward | SparseFeedForward | PlainExperts


def shared_tokens(
    device: Device, config: ModelConfig, *feed_forwards: Layer | None, has_experts: bool
) -> SharedTokens:
    """The tokens of a layer's feed-forwards."""
    is_apart = device.all_to_all is not None if has_experts else device.replicates_dense
    layers = [layer for layer in feed_forwards if layer is not None]
    return SharedTokens(device, layers, is_apart=is_apart, is_summed=config.mlp_bias and not has_experts)


def dense_reduction(device: Device, *, has_bias: bool) -> Reduction:
    """How a feed-forward without experts ends. With attention groups SharedTokens adds up what each needs;
    a bias must be added once, to the whole sum."""
    if device.has_groups:
        return "all_reduce" if has_bias else "none"
    return reduction_of(device)


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
    bias, reduction = config.mlp_bias, dense_reduction(device, has_bias=config.mlp_bias)
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
