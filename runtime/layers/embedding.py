"""Token embedding and language model head, both sharded by vocabulary: the embedding, and a head that is tied
to it, over the ranks that have the same tokens; a head of its own over all ranks, or over these as well."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding, normalize

from runtime.devices.base import Device, PackedWeight
from runtime.devices.packed import GgmlWeights, PackedRows
from runtime.layers.quantization.ggml_weight import GgmlWeight, ggml_weight
from runtime.layers.sampling.sampler import clean
from runtime.layers.weight import (
    FormatLookup,
    Layer,
    RankGroup,
    Shard,
    SourceTensor,
    Weight,
    replicated_shard,
)


def vocabulary_weight(
    device: Device, ranks: RankGroup, dtype: torch.dtype, vocab_size: int, hidden_size: int
) -> tuple[Weight, Shard]:
    """This rank's rows of a weight [vocab, hidden] that `ranks` share, and which they are. All of these have
    ceil(vocab / ranks) rows; those past the end of the vocabulary are zero."""
    rows = -(-vocab_size // ranks.size)
    start = min(rows * ranks.rank, vocab_size)
    shard = Shard(vocab_size, start, min(rows, vocab_size - start))
    source = SourceTensor((vocab_size, hidden_size), 0, shard)
    weight = Weight.empty((rows, hidden_size), {"": source}, dtype, device.torch_device)
    weight.tensor[shard.size :].zero_()
    return weight, shard


def vocabulary_bias(device: Device, ranks: RankGroup, dtype: torch.dtype, vocab_size: int) -> Weight:
    """As `vocabulary_weight`, of a number for each row."""
    weight, shard = vocabulary_weight(device, ranks, dtype, vocab_size, 1)
    return Weight(weight.tensor.squeeze(1), {"": SourceTensor((vocab_size,), 0, shard)})


def _ggml_weight(
    device: Device, dtype: torch.dtype, formats: FormatLookup, shape: tuple[int, int]
) -> GgmlWeight | None:
    """A weight [vocab, hidden] that stays in ggml's types; None: it is a plain one."""
    if device.collectives.size > 1:
        return None
    outputs, inputs = map(replicated_shard, shape)
    return ggml_weight(device, dtype, formats(""), {"": outputs}, inputs)


def _children(
    children: Iterator[tuple[str, Layer | Weight]], ggml: GgmlWeight | None
) -> Iterator[tuple[str, Layer | Weight]]:
    """The children of a layer, those of its `ggml` directly."""
    yield from (child for child in children if child[0] not in ("ggml", "tied"))
    if ggml is not None:
        yield from ggml.children()


class Embedding(Layer):
    """Token embedding."""

    def __init__(self, device: Device, dtype: torch.dtype, vocab_size: int, hidden_size: int) -> None:
        self.device, self.ranks = device, device.group_ranks
        self.dtype, self.vocab_size, self.hidden_size = dtype, vocab_size, hidden_size
        weight, self.shard = vocabulary_weight(device, self.ranks, dtype, vocab_size, hidden_size)
        self.weight: Weight | None = weight
        self.ggml: GgmlWeight | None = None  # in place of the weight, until it is packed
        self.packed: PackedRows | None = None  # in place of the weight: ggml's types, or what a head packed

    def allocate(self, formats: FormatLookup) -> None:
        """Gives up the plain weight where the device reads rows of ggml's types."""
        self.ggml = _ggml_weight(self.device, self.dtype, formats, (self.vocab_size, self.hidden_size))
        if self.ggml is not None:
            self.weight = None

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """The weight."""
        return _children(super().children(), self.ggml)

    def finish_loading(self) -> None:
        """Packs a weight of ggml's types; a plain one stays as it is."""
        if self.ggml is not None:
            self.packed, self.ggml = self.ggml.pack_rows(self.device), None

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
        """Token ids int64 [T] -> vectors [T, hidden], the same on every rank that has these tokens."""
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
        self,
        device: Device,
        dtype: torch.dtype,
        vocab_size: int,
        hidden_size: int,
        tied: Embedding | None,
        *,
        is_quantized: bool = False,
        has_bias: bool = False,
        is_normed: bool = False,
    ) -> None:
        """The head computes in `dtype`. Where that is wider than the dtype of a weight it shares, the head
        has a copy of the weight. `is_quantized`: devices that have a product for it shall round the weight to
        8 bits. `is_normed`: rows of the weight are divided by their length."""
        self.is_quantized, self.is_normed = is_quantized, is_normed
        self.device = device
        is_of_group = tied is not None or (device.attention is not None and device.attention.has_own_head)
        self.ranks = device.group_ranks if is_of_group else device.collectives
        self.dtype = dtype
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.tied = tied
        self.weight: Weight | None = (
            None if tied else vocabulary_weight(device, self.ranks, dtype, vocab_size, hidden_size)[0]
        )
        self.bias = vocabulary_bias(device, self.ranks, dtype, vocab_size) if has_bias else None
        self.ggml: GgmlWeight | None = None  # in place of the weight, until it is packed
        self.packed: PackedWeight | None = None  # what the device made of the weight

    def allocate(self, formats: FormatLookup) -> None:
        """Gives up the plain weight where the device computes with ggml's types."""
        if self.weight is not None:
            self.ggml = _ggml_weight(self.device, self.dtype, formats, (self.vocab_size, self.hidden_size))
            self.weight = self.weight if self.ggml is None else None

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """The weight in ggml's types, if the head has one; the embedding's is the embedding's own child."""
        return _children(super().children(), self.ggml)

    def finish_loading(self) -> None:
        """Packs the weight for the device. Where the embedding cannot read packed rows, a large tied weight
        is used as it is, for the embedding needs it so."""
        if self.ggml is not None:
            self.packed, self.ggml = self.ggml.pack(self.device), None
            return
        if self.tied is not None and self.tied.weight is None:  # of ggml's types, and packed before
            self.packed, self.tied = self.tied.packed, None
            return
        weight = self.weight if self.tied is None else self.tied.weight
        assert weight is not None
        plain, ops = weight.tensor, self.device.ops
        plain = normalize(plain) if self.is_normed else plain
        is_large = self.tied is not None and plain.nbytes > PACKED_COPY_BYTES and plain.dtype == self.dtype
        if self.is_quantized and (ggml := self._ggml_of(plain)) is not None:
            self.packed = ggml.quantized(plain)
        else:
            self.packed = plain if is_large and not ops.packs_rows else ops.pack_linear(plain.to(self.dtype))
        if self.tied is not None and isinstance(self.packed, PackedRows):
            self.tied.share(self.packed)
        self.weight = self.tied = None

    def _ggml_of(self, plain: Tensor) -> GgmlWeights | None:
        """What rounds the weight to 8 bits; None: it cannot, for this dtype or this many inputs."""
        ggml, (outputs, inputs) = self.device.ggml, plain.shape
        fits = ggml is not None and inputs % 32 == 0 and ggml.computes((("Q8_0", outputs),), self.dtype)
        return ggml if fits else None

    @property
    def is_divided(self) -> bool:
        """Whether each rank of the model has rows of its own."""
        return self.ranks.size > 1 and self.ranks is self.device.collectives

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [N, hidden] -> logits, float32 [N, vocabulary]; both are the same on all `ranks`."""
        logits = self.own_logits(x)
        if self.ranks.size == 1:
            return logits
        return self.ranks.all_gather(logits, 1)[:, : self.vocab_size]

    def largest(self, logits: Tensor) -> Tensor:
        """The first of the largest logits of all ranks, int64 [N], from those of this rank, which are
        overwritten: the ranks gather two numbers of a row, and not the vocabulary."""
        start = min(logits.shape[1] * self.ranks.rank, self.vocab_size)
        own = clean(logits[:, : self.vocab_size - start])  # rows past the vocabulary are none
        if own.shape[1] == 0:
            own, start = logits.new_full((len(logits), 1), -torch.inf), 0
        values, places = own.max(dim=1)
        pairs = torch.stack((values.double(), (places + start).double()))
        found, ids = self.ranks.all_gather(pairs.unsqueeze(0), 0).unbind(1)
        return ids.gather(0, found.argmax(dim=0, keepdim=True)).squeeze(0).long()

    def own_logits(self, x: Tensor) -> Tensor:
        """As `forward`, of this rank's rows."""
        # packed rows are multiplied by inputs of any dtype: logits are not rounded to the model's
        inputs = x.float() if isinstance(self.packed, PackedRows) else x.to(self.dtype)
        bias = None if self.bias is None else self.bias.tensor.to(inputs.dtype)
        return self.device.ops.linear(inputs, self.packed, bias).float()
