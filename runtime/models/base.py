"""What a rank needs of any model. models/config/registry.py names the classes that implement it.

    Model             hidden states, and vectors that are pooled of them          (every model)
    GenerativeModel   logits                                                      (decoders)
    PiecewiseModel    the step in pieces between its attentions                   (decoders of this runtime)

A model is made from (device, dtype, config), and its weights are loaded by models/loader.py.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.linear import Linear
from runtime.layers.pooling import PoolingMetadata
from runtime.layers.weight import FormatLookup, Layer, PackedModules, Weight
from runtime.models.checkpoint import TensorSlice
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.renames import Renames

Result = TypeVar("Result")


class TokenMixer(Protocol):
    """What mixes the tokens of a sequence, between projections: attention, or a recurrent mixer. Experts that
    are computed one by one are one, too: how, depends on the tokens."""

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """[T, ...] of the step's tokens, what was projected of them, -> [T, ...] before the output
        projection. It alone depends on rows, lengths and states, and graphs of pieces stop before it."""
        ...


class AttentionLayer(Protocol):
    """The attention block of a decoder layer: projections, and attention between them. A TokenMixer."""

    attention: Attention | MlaAttention
    o_proj: Linear
    gathers_tokens: bool  # `project` is given this rank's shard of the tokens, and gathers them itself

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None: ...

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """x [T, hidden] -> the queries, in the form that `attend` takes; keys and values go to the cache."""
        ...

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Attention output [T, heads * value size], before `o_proj`."""
        ...


# Yields the next layer that mixes tokens and its queries, is sent its output, returns the hidden states [T,
# hidden].
Pieces = Generator[tuple[TokenMixer, tuple[Tensor, ...]], Tensor, Tensor]


def attended(
    pieces: Generator[tuple[TokenMixer, tuple[Tensor, ...]], Tensor, Result], batch: ForwardBatch
) -> Result:
    """What `pieces` return, with each mixer of tokens computed where they yield it."""
    output = None
    try:
        while True:
            mixer, queries = pieces.send(output)  # type: ignore[arg-type]  # the first one is None
            output = mixer.attend(queries, batch)
    except StopIteration as end:
        found: Result = end.value
        return found


# DecoderLayer.after_attention, compiled: (layer, attention output, residual, batch) -> as that
CompiledLayer = Callable[["DecoderLayer", Tensor, Tensor, ForwardBatch], tuple[Tensor, Tensor]]


class DecoderLayer(Protocol):
    """A block of a decoder, split where attention is."""

    self_attn: AttentionLayer

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None: ...

    def before_attention(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """From the pair that the previous block returned, x and residual [T, hidden] (or this rank's shards
        of them), to the queries of all tokens and the new residual x + residual."""
        ...

    def after_attention(
        self, attended: Tensor, residual: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """From the attention output of all tokens to the pair that the next block begins with."""
        ...


class Model(Protocol):
    """A model on one rank. `layers`: its blocks, in order."""

    packed_modules: PackedModules
    renames: Renames
    ignored_weights: tuple[str, ...]  # patterns of tensors in a checkpoint that are not read
    layers: Sequence[Layer]

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None: ...

    @property
    def attentions(self) -> Sequence[Attention | MlaAttention]:
        """The attentions that need a key/value cache, in order; none in an encoder."""
        ...

    def allocate(self, formats: FormatLookup) -> None:
        """See Layer.allocate."""
        ...

    def finish_loading(self) -> None:
        """See Layer.finish_loading."""
        ...

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """See Layer.children."""
        ...

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The tokens' hidden states, [T, hidden]."""
        ...

    def pool(self, hidden: Tensor, pooling: PoolingMetadata) -> Tensor:
        """Embeddings or class scores of the rows that are complete, float32 [N, size], from the tokens'
        hidden states."""
        ...


class GenerativeModel(Model, Protocol):
    """A model that predicts the next token. Its hidden states are those before the last norm, where the
    norm is not part of its forward."""

    def forward(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Tensor:
        """The tokens' hidden states, [T, hidden]. `compiled`: computes what follows each attention, in place
        of the layers' `after_attention`."""
        ...

    def hidden_states(self, hidden: Tensor) -> Tensor:
        """Hidden states that are reported to clients, behind the last norm: [N, hidden] -> float32 [N,
        hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocabulary]."""
        ...


class PiecewiseModel(GenerativeModel, Protocol):
    """A decoder that can be run in pieces."""

    layers: Sequence[DecoderLayer]  # type: ignore[assignment]

    def piecewise(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Pieces:
        """`forward` with the attentions left to the caller: what lies between them can be captured in graphs
        of its own."""
        ...


class NamesTensors(Protocol):
    """A model whose weights are not named by packed modules and renames alone."""

    def checkpoint_key(self, tensor_name: str) -> tuple[str, str]:
        """Weight name and part that a checkpoint's tensor fills."""
        ...


def names_tensors(model: Model) -> TypeGuard[NamesTensors]:
    """Whether a model says itself which weights a checkpoint's tensors fill."""
    return hasattr(model, "checkpoint_key")


class TakesApart(Protocol):
    """A model whose weights are filled by smaller tensors than some checkpoints have."""

    def taken_apart(self, source: TensorSlice) -> Iterator[TensorSlice]:
        """The tensors that stand for one of a checkpoint's; itself, where it is none of these."""
        ...


def takes_apart(model: Model) -> TypeGuard[TakesApart]:
    """Whether a model takes tensors of a checkpoint apart."""
    return hasattr(model, "taken_apart")


def is_generative(model: Model) -> TypeGuard[GenerativeModel]:
    """Whether a model predicts tokens."""
    return hasattr(model, "logits")


def is_piecewise(model: Model) -> TypeGuard[PiecewiseModel]:
    """Whether a model can be run in pieces."""
    return hasattr(model, "piecewise")


def generative(model: Model) -> GenerativeModel:
    """The model, which predicts tokens."""
    assert is_generative(model), "tokens of a model that makes none"
    return model
