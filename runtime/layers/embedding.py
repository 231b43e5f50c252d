"""Token embedding and language model head, both sharded over the ranks by vocabulary."""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from runtime.devices.base import Device, PackedWeight
from runtime.layers.weight import Layer, Shard, SourceTensor, Weight


def vocabulary_weight(
    device: Device, dtype: torch.dtype, vocab_size: int, hidden_size: int
) -> tuple[Weight, Shard]:
    """This rank's rows of a weight [vocab, hidden], and which they are. All ranks have ceil(vocab / ranks)
    rows; those past the end of the vocabulary are zero."""
    ranks = device.collectives
    rows = -(-vocab_size // ranks.size)
    start = min(rows * ranks.rank, vocab_size)
    shard = Shard(vocab_size, start, min(rows, vocab_size - start))
    source = SourceTensor((vocab_size, hidden_size), 0, shard)
    weight = Weight.empty((rows, hidden_size), {"": source}, dtype, device.torch_device)
    weight.tensor[shard.size :].zero_()
    return weight, shard


class Embedding(Layer):
    """Token embedding."""

    def __init__(self, device: Device, dtype: torch.dtype, vocab_size: int, hidden_size: int) -> None:
        self.ranks = device.collectives
        self.weight, self.shard = vocabulary_weight(device, dtype, vocab_size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [T] -> vectors [T, hidden], the same on every rank."""
        if self.ranks.size == 1:
            return embedding(token_ids, self.weight.tensor)
        local = token_ids - self.shard.start
        is_here = (local >= 0) & (local < self.shard.size)
        rows = embedding(torch.where(is_here, local, 0), self.weight.tensor)
        return self.ranks.all_reduce(rows * is_here.unsqueeze(1))


PACKED_COPY_BYTES = 64 << 20  # a tied weight up to this size gets a second, packed copy


class Head(Layer):
    """Language model head. A tied head shares the embedding's weight."""

    def __init__(
        self, device: Device, dtype: torch.dtype, vocab_size: int, hidden_size: int, tied: Embedding | None
    ) -> None:
        """The head computes in `dtype`. Where that is wider than the dtype of a weight it shares, the head
        has a copy of the weight."""
        self.device = device
        self.dtype = dtype
        self.vocab_size = vocab_size
        # the embedding's weight stays as it is, because the embedding reads it row by row
        self.tied = None if tied is None else tied.weight.tensor
        self.weight: Weight | None = (
            None if tied else vocabulary_weight(device, dtype, vocab_size, hidden_size)[0]
        )
        self.packed: PackedWeight | None = None  # what Ops.pack_linear made of the weight

    def finish_loading(self) -> None:
        """Packs the weight for the device, except a large tied one, which is used as it is."""
        plain = self.tied if self.weight is None else self.weight.tensor
        assert plain is not None
        is_kept = self.tied is not None and self.tied.nbytes > PACKED_COPY_BYTES and plain.dtype == self.dtype
        self.packed = plain if is_kept else self.device.ops.pack_linear(plain.to(self.dtype))
        self.weight = self.tied = None

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [N, hidden] -> logits, float32 [N, vocabulary], the same on every rank."""
        logits = self.device.ops.linear(x.to(self.dtype), self.packed, None).float()
        if self.device.collectives.size == 1:
            return logits
        return self.device.collectives.all_gather(logits, 1)[:, : self.vocab_size]
