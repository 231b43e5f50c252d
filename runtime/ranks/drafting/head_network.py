"""A head behind its target as a Network."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import ForwardBatch
from runtime.devices.decoder_spec import Forwarded
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.models.draft_heads import DraftHead
from runtime.ranks.drafting.network import Computed, selected


class HeadNetwork:
    """Entries are made from the next token and from what the target says of this one."""

    shift = 1
    windows = (0,)

    def __init__(self, head: DraftHead, ids: Tensor | None) -> None:
        """`ids`: the target's token for each of the head's, int64, rising; None: they have the same."""
        self.head = head
        self.width = head.width
        self.ids = ids

    @property
    def attentions(self) -> Sequence[Attention | MlaAttention]:
        """See Network."""
        return self.head.attentions

    def given(self, forwarded: Forwarded) -> Tensor:
        """See Network: the last hidden states, or those of the layers that the head asks for."""
        hidden = forwarded.hidden
        return hidden[:, self.head.target_size :] if self.head.algorithm == "EAGLE3" else hidden

    def states_of(self, given: Tensor) -> Tensor:
        """See Network."""
        return self.head.states_of(given)

    def compute(self, batch: ForwardBatch, states: Tensor | None, samples: np.ndarray) -> Computed | None:
        """See Network."""
        assert states is not None, "a head continues states"
        hidden = self.head.forward(batch, states)
        return Computed(*self.head.finish(selected(hidden, samples))) if len(samples) else None

    def captured(self, batch: ForwardBatch, states: Tensor | None, samples: Tensor) -> Computed:
        """See Network."""
        assert states is not None, "a head continues states"
        return Computed(*self.head.finish(self.head.forward(batch, states)[samples]))

    def forget(self) -> None:
        """See Network: there is nothing."""


def token_ids(head: DraftHead) -> Tensor | None:
    """The target's token for each of a head's own vocabulary; None: the head has the target's."""
    if head.d2t is None:
        return None
    offsets = head.d2t.tensor
    return offsets + torch.arange(len(offsets), device=offsets.device)
