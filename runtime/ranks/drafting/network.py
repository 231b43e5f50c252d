"""What a draft runner needs of a draft model, and the one kind that is a model of its own.

A draft model keeps keys and values of its layers in the pages of its target's. What it computes at position i
of a sequence is entry i:

    shift 0   entry i is made from token i                               a model of its own
    shift 1   entry i is made from token i + 1 and a state of token i    layers that continue the target's

The state of a token is what the target's hidden states say of it, or, of a draft, what the entry before it
gave.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.devices.decoder_spec import Forwarded
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.rotary import Rotary
from runtime.layers.upload import upload_int64
from runtime.layers.weight import Layer
from runtime.models.base import GenerativeModel, Model
from runtime.ranks.forward import Forward


@dataclass(frozen=True, slots=True)
class Computed:
    """What a pass gives behind the `N` entries that are sampled after."""

    logits: Tensor  # float32 [N, vocabulary of the draft model]
    states: Tensor | None  # [N, width], of the next entries; None: these need none


class Network(Protocol):
    """A draft model on one rank."""

    shift: int
    width: int  # numbers of a state; 0: there are none
    num_remade: int  # entries before a slot's last one that are made again with each new one
    windows: tuple[int, ...]  # sliding windows of its layers, 0 for full attention
    # int64: the target's token for each of the draft model's, rising; None: both have the same tokens
    ids: Tensor | None
    has_token_grids: bool  # its rotary positions are those of tokens in grids (ranks/token_grids.py)

    @property
    def attentions(self) -> Sequence[Attention | MlaAttention]:
        """The attentions of its layers, in order."""
        ...

    @property
    def parts(self) -> tuple[Layer | Model | Tensor, ...]:
        """Everything of it that has tensors on the device; nothing of its target."""
        ...

    def attach(self, target: Model) -> None:
        """The target was loaded again: what the two share is taken from this one."""
        ...

    def given(self, forwarded: Forwarded) -> Tensor:
        """What of the target's forward states are made of, [T, any]."""
        ...

    def states_of(self, given: Tensor) -> Tensor:
        """`given` of N tokens -> their states, [N, width]. Only where there are states."""
        ...

    def compute(self, batch: ForwardBatch, states: Tensor | None, samples: np.ndarray) -> Computed | None:
        """Makes entries of the tokens of the batch and of `states` [T, width]. `samples`: int64 [N], after
        which of them something is sampled; None: N is 0."""
        ...

    def captured(self, batch: ForwardBatch, states: Tensor | None, samples: Tensor) -> Computed:
        """As `compute`, in a body that is captured. `samples`: on the device."""
        ...

    def forget(self) -> None:
        """Drops what refers to caches that are released."""
        ...


class OwnModel:
    """A draft model that knows nothing of its target but the tokens."""

    shift = 0
    width = num_remade = 0
    ids = None

    def __init__(self, device: Device, model: GenerativeModel, windows: tuple[int, ...]) -> None:
        self.model = model
        self.windows = windows
        self.forward = Forward(device)
        rotaries: list[Rotary] = getattr(model, "rotaries", [])
        self.has_token_grids = any(len(rotary.axes) for rotary in rotaries)

    @property
    def attentions(self) -> Sequence[Attention | MlaAttention]:
        """See Network."""
        return self.model.attentions

    @property
    def parts(self) -> tuple[Layer | Model | Tensor, ...]:
        """See Network."""
        return (self.model,)

    def attach(self, target: Model) -> None:
        """See Network: nothing is shared."""

    def given(self, forwarded: Forwarded) -> Tensor:
        """See Network."""
        return forwarded.hidden

    def states_of(self, given: Tensor) -> Tensor:
        """See Network."""
        raise AssertionError("states of a model that has none")

    def compute(self, batch: ForwardBatch, states: Tensor | None, samples: np.ndarray) -> Computed | None:
        """See Network."""
        forwarded = self.forward.compute(self.model, batch, samples, None, None)
        if not len(samples):
            return None
        if forwarded.logits is not None:
            return Computed(forwarded.logits, None)
        return Computed(self.model.logits(selected(forwarded.hidden, samples)), None)

    def captured(self, batch: ForwardBatch, states: Tensor | None, samples: Tensor) -> Computed:
        """See Network."""
        return Computed(self.model.logits(self.model.forward(batch)[samples]), None)

    def forget(self) -> None:
        """See Network."""
        self.forward.forget()


def selected(rows: Tensor, places: np.ndarray) -> Tensor:
    """The rows at these places; `rows` itself where these are all."""
    return rows if len(places) == len(rows) else rows.index_select(0, upload_int64(places, rows.device))
