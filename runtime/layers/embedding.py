"""Token embedding and language model head, both sharded over the ranks by vocabulary."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding

from runtime.devices.base import Device, PackedWeight
from runtime.devices.packed import PackedRows
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
        self.dtype, self.hidden_size = dtype, hidden_size
        weight, self.shard = vocabulary_weight(device, dtype, vocab_size, hidden_size)
        self.weight: Weight | None = weight
        self.packed: PackedRows | None = None  # in place of the weight, where a head packed it

    def share(self, packed: PackedRows) -> None:
        """Reads its rows from what the head packed, and gives up the weight."""
        self.packed, self.weight = packed, None

    def rows(self, local: Tensor) -> Tensor:
        """Rows of this rank's part, by their index in it: int64 [T] -> [T, hidden]."""
        if self.packed is not None:
            return self.packed.rows(local).to(self.dtype)
        assert self.weight is not None
        return embedding(local, self.weight.tensor)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [T] -> vectors [T, hidden], the same on every rank."""
        if self.ranks.size == 1:
            return self.rows(token_ids)
        local = token_ids - self.shard.start
        is_here = (local >= 0) & (local < self.shard.size)
        rows = self.rows(torch.where(is_here, local, 0))
        return self.ranks.all_reduce(rows * is_here.unsqueeze(1))


PACKED_COPY_BYTES = 64 << 20  # a tied weight up to this size gets a second, packed copy


class Head(Layer):
    """Language model head. A tied head shares the embedding's weight, packed if the embedding can read
    that."""

    def __init__(
        self, device: Device, dtype: torch.dtype, vocab_size: int, hidden_size: int, tied: Embedding | None
    ) -> None:
        """The head computes in `dtype`. Where that is wider than the dtype of a weight it shares, the head
        has a copy of the weight."""
        self.device = device
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.tied = tied
        self.weight: Weight | None = (
            None if tied else vocabulary_weight(device, dtype, vocab_size, hidden_size)[0]
        )
        self.packed: PackedWeight | None = None  # what Ops.pack_linear made of the weight

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """Its own weight, and not the embedding's."""
        yield from (child for child in super().children() if child[0] != "tied")

    def finish_loading(self) -> None:
        """Packs the weight for the device. Where the embedding cannot read packed rows, a large tied weight
        is used as it is, for the embedding needs it so."""
        weight = self.weight if self.tied is None else self.tied.weight
        assert weight is not None
        plain, ops = weight.tensor, self.device.ops
        is_large = self.tied is not None and plain.nbytes > PACKED_COPY_BYTES and plain.dtype == self.dtype
        self.packed = plain if is_large and not ops.packs_rows else ops.pack_linear(plain.to(self.dtype))
        if self.tied is not None and isinstance(self.packed, PackedRows):
            self.tied.share(self.packed)
        self.weight = self.tied = None

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [N, hidden] -> logits, float32 [N, vocabulary], the same on every rank."""
        # packed rows are multiplied by inputs of any dtype: logits are not rounded to the model's
        inputs = x.float() if isinstance(self.packed, PackedRows) else x.to(self.dtype)
        logits = self.device.ops.linear(inputs, self.packed, None).float()
        if self.device.collectives.size == 1:
            return logits
        return self.device.collectives.all_gather(logits, 1)[:, : self.vocab_size]
