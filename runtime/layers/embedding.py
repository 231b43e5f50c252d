"""Token embedding and language model head, both split over the ranks by vocabulary."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from runtime.devices.base import Device
from runtime.layers.weight import Layer, Part, Share, Weight


def vocabulary_weight(
    device: Device, dtype: torch.dtype, vocab_size: int, hidden_size: int
) -> tuple[Weight, Share]:
    """Rows of this rank, [ceil(vocab / ranks), hidden]; those past the end of the vocabulary are zero."""
    ranks = device.collectives
    rows = -(-vocab_size // ranks.size)
    start = min(rows * ranks.rank, vocab_size)
    share = Share(vocab_size, start, min(rows, vocab_size - start))
    weight = Weight(
        (rows, hidden_size), {"": Part((vocab_size, hidden_size), 0, share)}, dtype, device.torch_device
    )
    weight.tensor[share.size :].zero_()
    return weight, share


class Embedding(Layer):
    """Token ids [T] -> vectors [T, hidden], the same on every rank."""

    def __init__(self, device: Device, dtype: torch.dtype, vocab_size: int, hidden_size: int) -> None:
        self.ranks = device.collectives
        self.weight, self.share = vocabulary_weight(device, dtype, vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return embedding(token_ids, self.weight.tensor)
        local = token_ids - self.share.start
        is_here = (local >= 0) & (local < self.share.size)
        rows = embedding(torch.where(is_here, local, 0), self.weight.tensor)
        return self.ranks.all_reduce(rows * is_here.unsqueeze(1))


PACKED_COPY_BYTES = 64 << 20  # a tied weight up to this size is worth a second, packed copy


class Head(Layer):
    """Vectors [N, hidden] -> logits, float32 [N, vocabulary], the same on every rank. A tied head shares the
    embedding's weight."""

    def __init__(
        self, device: Device, dtype: torch.dtype, vocab_size: int, hidden_size: int, tied: Embedding | None
    ) -> None:
        """Computes in `dtype`, which may be wider than the vectors' and that of a weight it shares: then it
        has a copy of that."""
        self.device = device
        self.dtype = dtype
        self.vocab_size = vocab_size
        # stays as it is, for it is read row by row too
        self.tied = None if tied is None else tied.weight.tensor
        self.weight: Weight | None = (
            None if tied else vocabulary_weight(device, dtype, vocab_size, hidden_size)[0]
        )
        self.packed: Any = None

    def finish(self) -> None:
        plain = self.tied if self.weight is None else self.weight.tensor
        assert plain is not None
        is_kept = self.tied is not None and self.tied.nbytes > PACKED_COPY_BYTES and plain.dtype == self.dtype
        self.packed = plain if is_kept else self.device.ops.pack_linear(plain.to(self.dtype))
        self.weight = self.tied = None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.device.ops.linear(x.to(self.dtype), self.packed, None).float()
        if self.device.collectives.size == 1:
            return logits
        return self.device.collectives.all_gather(logits, 1)[:, : self.vocab_size]
