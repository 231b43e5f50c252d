"""What changes logits before a token is sampled: penalties on tokens seen before, logit bias, banned stop
ids, and tokens that the request excludes.

State per slot, on the device; nothing is allocated before a request needs it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.devices.operands import Seen
from runtime.layers.fused_ops import penalise
from runtime.layers.sampling.captured_edits import CapturedEdits
from runtime.layers.sampling.sampler import FAR, clean
from runtime.layers.sampling.token_bans import SlotTokenBans
from runtime.layers.upload import float32_tensor, int64_tensor, upload_int64
from runtime.messages.steps import Admit, SlotSampling

Penalises = Callable[[Tensor, Tensor, Seen, Tensor], None]  # FusedOps.penalise


def has_penalties(sampling: SlotSampling) -> bool:
    """Whether logits depend on the tokens before."""
    return (
        sampling.frequency_penalty != 0 or sampling.presence_penalty != 0 or sampling.repetition_penalty != 1
    )


RESERVED = 1 << 26  # bytes of counts that captured steps may refer to


class Counts:
    """Which tokens the penalised slots have seen: a row of counts each, in tensors that grow by doubling. The
    first row is that of all others, and changes nothing."""

    def __init__(self, vocab_size: int, torch_device: torch.device, penalises: Penalises = penalise) -> None:
        self.vocab_size = vocab_size
        self.torch_device = torch_device
        self.penalises = penalises
        self.rows: dict[int, int] = {}  # slot -> row
        self.free: list[int] = []
        self.generated = torch.zeros(0, vocab_size, dtype=torch.int32, device=torch_device)
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=torch_device)
        self.penalties = torch.zeros(0, 3, device=torch_device)  # frequency, presence, repetition
        # int64 [slots + 1], row by slot on the device, where captured steps penalise
        self.captured_rows: Tensor | None = None

    def reserve(self, num_slots: int) -> None:
        """Rows for captured steps, which hold as long as the tensors do not grow beyond."""
        if self.captured_rows is None:
            self._grow(1 + max(1, min(num_slots, RESERVED // (5 * self.vocab_size))))
            self.captured_rows = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.torch_device)

    def admit(self, slot: int, admit: Admit) -> None:
        """Forgets what the slot held; counts the new sequence's tokens if its penalties need them."""
        if slot in self.rows:
            self.free.append(self.rows.pop(slot))
            if self.captured_rows is not None:
                self.captured_rows[slot] = 0
        sampling = admit.sampling
        if not has_penalties(sampling):
            return
        if not self.free:
            self._grow(max(4, 2 * len(self.generated)))
        row = self.rows[slot] = self.free.pop()
        if self.captured_rows is not None:
            self.captured_rows[slot] = row
        history = upload_int64(admit.history, self.torch_device)
        self.in_prompt[row] = False
        self.in_prompt[row, history[: admit.prompt_len]] = True
        self.generated[row] = 0
        answer = history[admit.prompt_len :]
        self.generated[row].index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))
        self.penalties[row] = float32_tensor(
            [sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty],
            self.torch_device,
        )

    def _grow(self, new: int) -> None:
        old = len(self.generated)
        for name in ("generated", "in_prompt", "penalties"):
            held: Tensor = getattr(self, name)
            grown = held.new_zeros(new, held.shape[1])
            grown[:old] = held
            setattr(self, name, grown)
        self.penalties[0, 2] = 1
        self.free.extend(range(new - 1, max(old, 1) - 1, -1))

    def apply(
        self, logits: Tensor, places: list[int], slots: list[int], contexts: dict[int, list[int]]
    ) -> None:
        """Penalises, in place, the rows `places` of logits, which belong to `slots`; `contexts`: by row of
        logits, drafts that count as generated."""
        at = int64_tensor([self.rows[slot] for slot in slots], self.torch_device)
        seen = Seen(self.generated, self.in_prompt, self.penalties)
        if contexts:
            seen = self._with_drafts(at, [contexts.get(place, []) for place in places])
            at = torch.arange(len(places), device=self.torch_device)
        self.penalises(logits, int64_tensor(places, self.torch_device), seen, at)

    def add(self, places: list[int], slots: list[int], tokens: Tensor, accepted: Tensor | None) -> None:
        """Counts the tokens just sampled; `places` are those of `slots` in `tokens`. `accepted`, bool [N]:
        which of `tokens` belong to their sequences; None: all, one for each slot."""
        index = int64_tensor([self.rows[slot] for slot in slots], self.torch_device)
        at = int64_tensor(places, self.torch_device)
        if accepted is None:
            self.generated[index, tokens[at]] += 1
        else:
            self.generated.index_put_((index, tokens[at]), accepted[at].int(), accumulate=True)

    def _with_drafts(self, at: Tensor, drafts: list[list[int]]) -> Seen:
        """What the rows `at` have seen, [n, V] each, with these tokens on top."""
        generated = self.generated[at]
        rows = [row for row, tokens in enumerate(drafts) for _ in tokens]
        if rows:
            index = int64_tensor(rows, self.torch_device), int64_tensor(sum(drafts, []), self.torch_device)
            ones = torch.ones(len(rows), dtype=generated.dtype, device=self.torch_device)
            generated.index_put_(index, ones, accumulate=True)
        return Seen(generated, self.in_prompt[at], self.penalties[at])

    def apply_captured(self, logits: Tensor, slots: Tensor) -> None:
        """`apply` for all rows of logits in a captured body: `slots`, int64 [N], are known on the device
        alone."""
        assert self.captured_rows is not None, "captured before rows were reserved"
        rows = torch.arange(len(slots), device=self.torch_device)
        self.penalises(
            logits, rows, Seen(self.generated, self.in_prompt, self.penalties), self.captured_rows[slots]
        )

    def add_captured(self, slots: Tensor, tokens: Tensor) -> None:
        """`add` in a captured body. The row of those that are not penalised may count wrongly."""
        assert self.captured_rows is not None, "captured before rows were reserved"
        self.generated[self.captured_rows[slots], tokens] += 1


class LogitsPenalties:
    """All changes of logits that some slots ask for."""

    def __init__(self, vocab_size: int, torch_device: torch.device, penalises: Penalises = penalise) -> None:
        self.torch_device = torch_device
        self.counts = Counts(vocab_size, torch_device, penalises)
        self.biases: dict[int, tuple[Tensor, Tensor]] = {}  # slot -> ids, values
        self.bans: dict[int, tuple[int, Tensor]] = {}  # slot -> min_len, ids
        self.token_bans = SlotTokenBans(vocab_size, torch_device)
        self.edits: CapturedEdits | None = None  # the same biases and bans, where captured steps apply them

    def reserve(self, num_slots: int) -> None:
        """Memory for captured steps; see Counts.reserve."""
        self.counts.reserve(num_slots)
        if self.edits is None:
            self.edits = CapturedEdits(num_slots, self.torch_device)

    def admit(self, admit: Admit) -> None:
        """Replaces the slot's penalties, bias and bans by those of a new sequence."""
        slot, sampling = admit.slot, admit.sampling
        self.counts.admit(slot, admit)
        self.token_bans.admit(admit)
        if self.edits is not None:
            self.edits.admit(admit)
        self.biases.pop(slot, None)
        self.bans.pop(slot, None)
        if sampling.bias_ids:
            self.biases[slot] = (
                int64_tensor(sampling.bias_ids, self.torch_device),
                float32_tensor(sampling.bias_values, self.torch_device),
            )
        if sampling.stop_ids and sampling.min_len > 0:
            self.bans[slot] = (sampling.min_len, int64_tensor(sampling.stop_ids, self.torch_device))

    def apply(
        self,
        logits: Tensor,
        slots: list[int],
        lengths: list[int],
        contexts: dict[int, list[int]] | None = None,
    ) -> Tensor:
        """Finite logits [N, V] of sequences that are `lengths` tokens long -> what to sample from; the
        argument stays as it is. `contexts`: by row of logits, drafts that the sequence has at that place."""
        penalised = self._penalised(slots)
        biased = [index for index, slot in enumerate(slots) if slot in self.biases]
        banned = [
            index
            for index, slot in enumerate(slots)
            if slot in self.bans and lengths[index] < self.bans[slot][0]
        ]
        excluding = self.token_bans.places(slots)
        if not (penalised or biased or banned or excluding):
            return logits
        logits = logits.clone()
        if penalised:
            self.counts.apply(logits, penalised, [slots[index] for index in penalised], contexts or {})
        for index in biased:
            ids, values = self.biases[slots[index]]
            logits[index].index_add_(0, ids, values)
        clean(logits)  # a tiny repetition penalty may overflow
        for index in banned:
            logits[index].index_fill_(0, self.bans[slots[index]][1], -2 * FAR)
        self.token_bans.apply(logits, excluding, slots, contexts or {})
        return logits

    def apply_captured(self, logits: Tensor, slots: Tensor, lengths: Tensor) -> None:
        """`apply` for all rows of finite logits, in place, in a captured body: `slots` and `lengths`, int64
        [N], are known on the device alone. What tables have no room for is not among them."""
        assert self.edits is not None, "captured before tables were reserved"
        self.counts.apply_captured(logits, slots)
        self.edits.add_biases(logits, slots)
        clean(logits)
        self.edits.ban(logits, slots, lengths)

    def add(self, slots: list[int], tokens: Tensor, accepted: Tensor | None = None) -> None:
        """Counts the tokens sampled for `slots`, where penalties need them; of several for one slot those
        `accepted`, bool [N]."""
        penalised = self._penalised(slots)
        if penalised:
            self.counts.add(penalised, [slots[index] for index in penalised], tokens, accepted)

    def _penalised(self, slots: list[int]) -> list[int]:
        return [index for index, slot in enumerate(slots) if slot in self.counts.rows]
