"""The attention of transformers' models over our pages, behind transformers' interface for attention.

A model is built with `attn_implementation` TRIAL and run once on the meta device, where nothing is computed:
its attention modules say how they attend (scale, window, cap, sinks), and its masks are compared with those
that paged attention has. From then on it runs with PAGED: queries, keys and values come here, and no masks
are made at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface

from runtime.devices.attention_scores import Scores
from runtime.devices.base import Device, ForwardBatch
from runtime.errors import ModelError
from runtime.layers.attention.paged import Attention

BIASES = ("position_bias", "alibi", "block_mask", "score_mod")  # arguments that pages have nothing for
PAGED, TRIAL = "runtime_paged", "runtime_trial"
# distances and positions at which masks are compared; the largest is beyond chunks that models have
POSITIONS = (0, 1, 2, 3, 7, 8, 15, 16, 63, 64, 127, 128, 1023, 1024, 4096, 8191, 8192, 40000)


@dataclass
class Step:
    """The step that is being computed. Shared by the attention modules of a model."""

    batch: ForwardBatch | None = None


@dataclass(frozen=True, slots=True)
class AttendedLayer:
    """How an attention module attends. Sizes are of one head."""

    index: int  # `layer_idx` of the module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    cap: float
    sinks: str  # name of the module's parameter that is added to scores as sinks; empty: none
    module: nn.Module


class PagedModule:
    """What an attention module of transformers calls during steps."""

    def __init__(self, attention: Attention, step: Step) -> None:
        self.attention = attention
        self.step = step

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [1, H, T, D], key [1, K, T, D] and value [1, K, T, V] -> [1, T, H, V]. Keys and values go to
        the cache, values with zeros up to the size of keys."""
        batch, size = self.step.batch, value.shape[-1]
        assert batch is not None, "attention outside of a step"
        value = pad(value, (0, key.shape[-1] - size))
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        self.attention.store(k, v, batch)
        return self.attention.forward(q, batch).view(1, *q.shape)[..., :size].contiguous()


@dataclass
class Trial:
    """Notes how attention modules attend, during the run on the meta device."""

    layers: list[AttendedLayer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object
) -> tuple[Tensor, None]:
    """Attention of a step, as transformers calls it."""
    paged: PagedModule = module.runtime_attention  # type: ignore[assignment]
    return paged(query, key, value), None


def try_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Notes how a module attends. The result has the shape of an attention output, [1, T, H, V]. Raises
    ModelError for a module that belongs to no layer of a decoder."""
    trial: Trial | None = getattr(module, "runtime_trial", None)  # type: ignore[assignment]
    if trial is None:
        raise ModelError("it attends in modules that have no number of a layer (layer_idx)")
    biases = [name for name in BIASES if others.get(name) is not None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        trial.errors.append("its attention has masks of its own")
    if biases:
        trial.errors.append(f"its attention takes {biases[0]}")
    if causal is False:
        trial.errors.append("its attention is not causal")
    sinks = "" if s_aux is None else _parameter_name(module, s_aux)
    if sinks is None:
        trial.errors.append("its attention sinks are no parameter")
    if value.shape[-1] > key.shape[-1]:
        trial.errors.append("its values are wider than its keys")
    if key.shape[-2] != query.shape[-2]:
        trial.errors.append("its keys are of other tokens than its queries")
    trial.layers.append(
        AttendedLayer(
            index=int(module.layer_idx),  # type: ignore[arg-type]
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[-1],
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=int(sliding_window or 0),
            cap=float(softcap or 0.0),
            sinks=sinks or "",
            module=module,
        )
    )
    texts, heads, tokens, _ = query.shape
    return query.new_empty(texts, tokens, heads, value.shape[-1]), None


def _parameter_name(module: nn.Module, tensor: Tensor) -> str | None:
    return next((name for name, one in module.named_parameters() if one is tensor), None)


def try_mask(mask_function: Callable[..., Tensor], **_: object) -> None:
    """Raises ModelError for a mask other than causal attention, with a window or without."""
    with torch.device("cpu"):  # the trial itself is on the meta device
        positions, zero = torch.tensor(POSITIONS), torch.tensor(0)
        distance = positions[:, None] - positions
        seen = torch.as_tensor(mask_function(zero, zero, positions[:, None], positions[None])).expand_as(
            distance
        )
    visible, hidden = distance[seen & (distance >= 0)], distance[~seen & (distance >= 0)]
    is_window = not len(hidden) or not len(visible) or int(visible.max()) < int(hidden.min())
    if bool((seen & (distance < 0)).any()) or not is_window:
        raise ModelError("its attention masks are neither causal nor sliding windows")


def register() -> None:
    """Makes our attention known to transformers."""
    AttentionInterface.register(PAGED, attend)
    AttentionInterface.register(TRIAL, try_attention)
    AttentionMaskInterface.register(TRIAL, try_mask)


def paged_attention(device: Device, position: int, layer: AttendedLayer) -> Attention:
    """The attention of a layer. `position`: of its cache among those of all layers."""
    scores = Scores(layer.scale, layer.window, layer.cap)
    return Attention(device, position, layer.num_kv_heads, layer.head_dim, scores)
