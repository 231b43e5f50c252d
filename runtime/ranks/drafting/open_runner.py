"""Makes the draft runner of a rank, with the states of a draft model that has recurrent layers."""

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.sampling.logits_ops import logits_ops_of
from runtime.messages.ranks import StartRank
from runtime.ranks.drafting.draft_runner import DraftRunner
from runtime.ranks.drafting.draft_states import DraftStates
from runtime.ranks.drafting.open_drafts import LoadedDraft
from runtime.ranks.slots import Slots


def open_drafts(
    device: Device,
    draft: LoadedDraft | None,
    slots: Slots,
    kv: list[tuple[Tensor, ...]],
    start: StartRank,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> DraftRunner | None:
    """The draft model over its caches and states; None: there is none. `dtype`: of the activations;
    `state_dtype`: of recurrent states."""
    if draft is None or start.speculation is None:
        return None
    states = None
    if draft.recurrent is not None:
        num_slots = slots.padding + 1
        states = DraftStates(draft.device, draft.recurrent, dtype, state_dtype, num_slots)
    ops, speculation = logits_ops_of(device), start.speculation
    return DraftRunner(
        draft.device, draft.network, slots, kv, start.page_size, speculation, dtype, ops, states
    )


def draft_state_bytes(
    draft: LoadedDraft, start: StartRank, dtype: torch.dtype, state_dtype: torch.dtype
) -> int:
    """Bytes that the states of a draft model take on this rank."""
    if draft.recurrent is None:
        return 0
    ranks = draft.device.collectives.size
    return DraftStates.num_bytes(
        draft.recurrent, ranks, dtype.itemsize, state_dtype.itemsize, start.max_slots + 1
    )
