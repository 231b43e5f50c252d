"""Packed experts in another order (Experts.rearranged), of devices that pack them as tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from runtime.devices.all_to_all import PackedExperts


def rearranged_tensors(
    packed: PackedExperts, added: PackedExperts | None, order: Sequence[int]
) -> PackedExperts:
    """See Experts.rearranged: each tensor of `packed` has an entry for each expert in its first dimension,
    and keeps its memory."""
    more = [None for _ in tensors_of(packed)] if added is None else list(tensors_of(added))
    for tensor, behind in zip(tensors_of(packed), more, strict=True):
        both = _octets(tensor) if behind is None else torch.cat((_octets(tensor), _octets(behind)))
        _octets(tensor).copy_(both.index_select(0, torch.tensor(order, device=tensor.device)))
    return packed


def _octets(tensor: Tensor) -> Tensor:
    """Numbers of one byte as plain ones: 8-bit floats have few operators."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def tensors_of(packed: object) -> Iterator[Tensor]:
    """All tensors that packed experts are made of, in one order."""
    if isinstance(packed, Tensor):
        yield packed
    elif isinstance(packed, list | tuple):
        for one in packed:
            yield from tensors_of(one)
    elif is_dataclass(packed):
        for field in fields(packed):
            yield from tensors_of(getattr(packed, field.name))
