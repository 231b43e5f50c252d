"""A head behind its target as a Network, and several of which each makes one draft."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import ForwardBatch
from runtime.devices.decoder_spec import Forwarded
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.upload import upload_int64
from runtime.layers.weight import Layer
from runtime.models.base import Model
from runtime.models.draft_heads import DraftHead
from runtime.ranks.drafting.network import Computed, selected


class HeadNetwork:
    """Entries are made from the next token and from what the target says of this one."""

    shift = 1
    num_remade = 0

    def __init__(self, head: DraftHead, ids: Tensor | None) -> None:
        """`ids`: the target's token for each of the head's, int64, rising; None: they have the same."""
        self.head = head
        self.width = head.width
        self.windows = head.windows
        self.ids = ids
        self.has_token_grids = len(head.rotary.axes) > 0

    @property
    def attentions(self) -> Sequence[Attention | MlaAttention]:
        """See Network."""
        return self.head.attentions

    @property
    def parts(self) -> tuple[Layer | Model | Tensor, ...]:
        """See Network."""
        return (self.head,) if self.ids is None else (self.head, self.ids)

    def attach(self, target: Model) -> None:
        """See Network."""
        self.head.attach(target)

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
        if not len(samples):
            return None
        return Computed(*self.head.finish(selected(hidden, samples)))

    def captured(self, batch: ForwardBatch, states: Tensor | None, samples: Tensor) -> Computed:
        """See Network."""
        assert states is not None, "a head continues states"
        return Computed(*self.head.finish(self.head.forward(batch, states)[samples]))

    def forget(self) -> None:
        """See Network: there is nothing."""


class HeadsInTurn:
    """Heads of which each makes one draft of a chain. Head k makes entry i from token i + 1 + k, so its last
    k entries are made from drafts, and are made again when these tokens are known."""

    shift = 1
    ids = None

    def __init__(self, heads: list[DraftHead]) -> None:
        self.heads = heads
        self.width = heads[0].width
        self.windows = tuple(window for head in heads for window in head.windows)
        self.num_remade = len(heads) - 1
        self.has_token_grids = any(len(head.rotary.axes) for head in heads)

    @property
    def attentions(self) -> Sequence[Attention | MlaAttention]:
        """See Network."""
        return [attention for head in self.heads for attention in head.attentions]

    @property
    def parts(self) -> tuple[Layer | Model | Tensor, ...]:
        """See Network."""
        return tuple(self.heads)

    def attach(self, target: Model) -> None:
        """See Network."""
        for head in self.heads:
            head.attach(target)

    def given(self, forwarded: Forwarded) -> Tensor:
        """See Network."""
        return forwarded.hidden

    def states_of(self, given: Tensor) -> Tensor:
        """See Network."""
        return self.heads[0].states_of(given)

    def compute(self, batch: ForwardBatch, states: Tensor | None, samples: np.ndarray) -> None:
        """See Network: makes the entries of all heads. Those that need tokens behind the end of their row are
        made of any, and made again later."""
        assert not len(samples), "their drafts are made by `drafts`"
        self._make(batch, states, None, None)

    def drafts(
        self, batch: ForwardBatch, states: Tensor, ends: np.ndarray, sample: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """Makes the entries of all heads, and behind the last ones of `R` rows a draft of each head, int64
        [R, heads]. `ends`, int64 [R]: places of these last ones; `sample`: logits, float32 [R, vocabulary],
        and the number of the head -> tokens, int64 [R]."""
        return torch.stack(self._make(batch, states, upload_int64(ends, states.device), sample), dim=1)

    def _make(
        self,
        batch: ForwardBatch,
        states: Tensor | None,
        ends: Tensor | None,
        sample: Callable[[Tensor, int], Tensor] | None,
    ) -> list[Tensor]:
        assert states is not None, "a head continues states"
        tokens, drafts = batch.token_ids, []
        for number, head in enumerate(self.heads):
            hidden = head.forward(replace(batch, token_ids=tokens), states)
            states = head.carried(hidden)
            tokens = tokens.roll(-1)  # a head's token is the one behind that of the head before
            if ends is not None and sample is not None:
                logits, _ = head.finish(hidden.index_select(0, ends))
                drafts.append(sample(logits, number))
                tokens[ends] = drafts[-1]
        return drafts

    def captured(self, batch: ForwardBatch, states: Tensor | None, samples: Tensor) -> Computed:
        """See Network: they are in no graph (open_graphs.py)."""
        raise AssertionError("heads in turn in a captured body")

    def forget(self) -> None:
        """See Network: there is nothing."""


def token_ids(head: DraftHead) -> Tensor | None:
    """The target's token for each of a head's own vocabulary; None: the head has the target's."""
    if head.d2t is None:
        return None
    offsets = head.d2t.tensor
    return offsets + torch.arange(len(offsets), device=offsets.device)
