"""Logit biases and banned stop ids of captured steps: tables of all slots on the device, of a width that is
known when a step is captured."""

import torch
from torch import Tensor

from runtime.layers.sampling.sampler import FAR
from runtime.layers.upload import float32_tensor, int64_tensor
from runtime.messages.steps import Admit, SlotSampling

BIASES = 64  # the most ids with a bias, of one sequence
STOP_IDS = 16  # the most stop ids that are banned


def has_edits(sampling: SlotSampling) -> bool:
    """Whether a sequence has biases, or stop ids that are banned up to a length."""
    return bool(sampling.bias_ids or (sampling.stop_ids and sampling.min_len > 0))


def fits(sampling: SlotSampling) -> bool:
    """Whether the tables have room for what a sequence has of these."""
    return len(sampling.bias_ids) <= BIASES and (sampling.min_len <= 0 or len(sampling.stop_ids) <= STOP_IDS)


class CapturedEdits:
    """By slot: ids and what is added to their logits, and ids that are banned while the sequence is shorter
    than a length. What is not used has id 0 and changes nothing."""

    def __init__(self, num_slots: int, torch_device: torch.device) -> None:
        rows, self.torch_device = num_slots + 1, torch_device
        self.bias_ids = torch.zeros(rows, BIASES, dtype=torch.int64, device=torch_device)
        self.biases = torch.zeros(rows, BIASES, device=torch_device)
        self.stop_ids = torch.zeros(rows, STOP_IDS, dtype=torch.int64, device=torch_device)
        self.caps = torch.full((rows, STOP_IDS), torch.inf, device=torch_device)  # of banned ids' logits
        self.min_lens = torch.zeros(rows, dtype=torch.int64, device=torch_device)
        self.used: set[int] = set()

    def admit(self, admit: Admit) -> None:
        """Replaces what a slot has by that of a new sequence; nothing, where there is no room for it."""
        slot, sampling = admit.slot, admit.sampling
        if slot in self.used:
            self.used.discard(slot)
            self.bias_ids[slot], self.biases[slot] = 0, 0.0
            self.stop_ids[slot], self.caps[slot], self.min_lens[slot] = 0, torch.inf, 0
        if not has_edits(sampling) or not fits(sampling):
            return
        self.used.add(slot)
        if count := len(sampling.bias_ids):
            self.bias_ids[slot, :count] = int64_tensor(sampling.bias_ids, self.torch_device)
            self.biases[slot, :count] = float32_tensor(sampling.bias_values, self.torch_device)
        if (count := len(sampling.stop_ids)) and sampling.min_len > 0:
            self.stop_ids[slot, :count] = int64_tensor(sampling.stop_ids, self.torch_device)
            self.caps[slot, :count] = -2 * FAR
            self.min_lens[slot] = sampling.min_len

    def add_biases(self, logits: Tensor, slots: Tensor) -> None:
        """Adds the biases of `slots`, int64 [N], to logits [N, V] in place."""
        logits.scatter_add_(1, self.bias_ids[slots], self.biases[slots])

    def ban(self, logits: Tensor, slots: Tensor, lengths: Tensor) -> None:
        """Bans stop ids in finite logits [N, V], in place, of `slots` whose sequences are `lengths` long,
        both int64 [N]."""
        is_short = (lengths < self.min_lens[slots]).unsqueeze(1)
        caps = torch.where(is_short, self.caps[slots], torch.inf)
        logits.scatter_reduce_(1, self.stop_ids[slots], caps, "amin")
