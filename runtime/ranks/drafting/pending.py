"""The last tokens of each slot, and their states, which the draft model has not made entries of yet."""

import numpy as np
import torch
from torch import Tensor

from runtime.layers.upload import upload_int64
from runtime.ranks.drafting.ragged import Ragged


class Pending:
    """The `depth` last tokens of each slot, and with a width the states of those before them.

    The last column belongs to the slot's last token, at position `length`, which has no keys and values yet.
    It is known up to where entries are made (`reach`), so that a slot of a known length has a known number of
    pending ones: on the host, and where passes are captured, on the device too.
    """

    def __init__(
        self,
        num_slots: int,
        num_new: int,
        num_remade: int,
        width: int,
        dtype: torch.dtype,
        torch_device: torch.device,
    ) -> None:
        """Room for `num_new` entries that are to be made, and for `num_remade` before them that are made
        again with them."""
        self.num_new, self.num_remade = num_new, num_remade
        self.depth = depth = num_new + num_remade
        self.tokens = torch.zeros(num_slots, depth, dtype=torch.int64, device=torch_device)
        self.states = torch.zeros(num_slots, depth, width, dtype=dtype, device=torch_device)
        # entries before this position are made, int64 [num_slots]
        self._reach = np.zeros(num_slots, np.int64)
        self._is_behind = False  # captured passes have made entries that `_reach` does not know of
        self.reach_on_device: Tensor | None = None  # the same; None: nothing reads it there
        self.first = np.zeros(num_slots, np.int64)  # those before this one are of a cached prefix
        self.torch_device = torch_device

    def reserve(self) -> Tensor:
        """Up to where entries are made, on the device, kept up to date from now on."""
        if self.reach_on_device is None:
            self.reach_on_device = upload_int64(self._reach, self.torch_device)
        return self.reach_on_device

    def admit(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """The slots are other sequences', of which so many tokens have entries."""
        self.first[slots] = lengths
        self.reached(slots, lengths)

    def reached(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """Entries before the positions `ends` are made, int64."""
        self._reach[slots] = ends
        if self.reach_on_device is not None and len(slots):
            index = upload_int64(slots, self.torch_device)
            self.reach_on_device[index] = upload_int64(ends, self.torch_device)

    def reached_on_device(self, slots: np.ndarray, ends: np.ndarray | None) -> None:
        """Captured passes have made entries; `ends` as of `reached`, None: the host does not know."""
        if ends is None:
            self._is_behind = True
        else:
            self._reach[slots] = ends

    def counts(self, slots: np.ndarray, ends: np.ndarray, least: int) -> np.ndarray:
        """int64: how many entries before the positions `ends` are to be made, those that are made again among
        them; of more than are kept the others are given up. Waits for the device where captured passes ran
        since."""
        if self._is_behind and self.reach_on_device is not None:
            self._reach = self.reach_on_device.cpu().numpy().copy()
            self._is_behind = False
        new = np.clip(ends - self._reach[slots], least, self.num_new)
        again = np.clip(ends - new - self.first[slots], 0, self.num_remade)
        return np.where(new > 0, new + again, 0)

    def taken(self, slots: np.ndarray, counts: np.ndarray) -> tuple[Tensor, Tensor]:
        """The last `counts` tokens of each slot and their states, slot after slot."""
        rows = Ragged(counts)
        index = upload_int64(slots[rows.row], self.torch_device)
        column = upload_int64(self.depth - counts[rows.row] + rows.column, self.torch_device)
        return self.tokens[index, column], self.states[index, column]

    def put_last(self, slots: np.ndarray, tokens: Tensor, states: Tensor | None) -> None:
        """The last token of each slot, and the state of the one before it."""
        index = upload_int64(slots, self.torch_device)
        self.tokens[index, -1] = tokens
        if states is not None:
            self.states[index, -1] = states

    def put_before(
        self, slots: np.ndarray, counts: np.ndarray, tokens: Tensor, states: Tensor | None
    ) -> None:
        """Tokens and states of the last entries of each slot that are made again: of `counts` entries, slot
        after slot, in `tokens` and `states`."""
        ends = counts.cumsum()
        for back in range(1, self.num_remade + 1):
            has = counts >= back
            index, place = (upload_int64(ids[has], self.torch_device) for ids in (slots, ends - back))
            self.tokens[index, -1 - back] = tokens[place]
            if states is not None:
                self.states[index, -1 - back] = states[place]

    def columns(self, num_accepted: Tensor) -> Tensor:
        """int64 [V, depth]: which of the accepted tokens, 0 the first, stands in which column in the end;
        below 0: a token that is pending already."""
        column = torch.arange(self.depth, device=self.torch_device)
        return column - self.depth + num_accepted.unsqueeze(1)

    def append(self, slots: np.ndarray, columns: Tensor, tokens: Tensor, states: Tensor | None) -> None:
        """Puts accepted tokens behind those that are pending; the first ones leave. `columns`: as of
        `columns`; `tokens` int64 [V, depth] and `states` [V, depth, width]: by column, where it is new."""
        self.append_on_device(upload_int64(slots, self.torch_device), columns, tokens, states)

    def append_on_device(self, index: Tensor, columns: Tensor, tokens: Tensor, states: Tensor | None) -> None:
        """As `append`, of slots that the device knows, int64 [V]."""
        is_new = columns >= 0
        before = (columns + self.depth).clamp_max(self.depth - 1)
        self.tokens[index] = torch.where(is_new, tokens, self.tokens[index].gather(1, before))
        if states is not None:
            kept = self.states[index].gather(1, before.unsqueeze(2).expand_as(states))
            self.states[index] = torch.where(is_new.unsqueeze(2), states.to(kept.dtype), kept)
