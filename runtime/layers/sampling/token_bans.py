"""Tokens that a request excludes: all but those of its `allowed_token_ids`, and its `bad_words`.

A bad word is a sequence of tokens, whose last one is banned where the answer ends with those before it. So a
word of one token is banned everywhere, and a longer one needs to know the answer: such slots wait for the
tokens of the step before, as grammars do (`ModelRunner.settle`).
"""

import numpy as np
import torch
from torch import Tensor

from runtime.layers.sampling.sampler import FAR
from runtime.layers.upload import int64_tensor, upload
from runtime.messages.requests import TokenBans
from runtime.messages.steps import Admit

BAD_WORD = -2 * FAR  # like a stop id below the minimum length
NOT_ALLOWED = -3 * FAR  # below bad words, and above what a grammar bans


class BadWords:
    """The bad words of one slot that have several tokens, and the end of its answer."""

    def __init__(self, words: tuple[tuple[int, ...], ...], answer: list[int]) -> None:
        self._keep = max(map(len, words)) - 1
        self._tail = answer[-self._keep :]
        self._by_prefix_end: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            self._by_prefix_end.setdefault(word[-2], []).append(word)

    def extend(self, tokens: list[int]) -> None:
        """The answer goes on with `tokens`."""
        self._tail = [*self._tail, *tokens][-self._keep :]

    def banned(self, drafts: list[int]) -> list[int]:
        """Tokens that would complete a word behind `drafts`, which follow the answer."""
        tail = [*self._tail, *drafts][-self._keep :]
        if not tail:
            return []
        words = self._by_prefix_end.get(tail[-1], [])
        return [word[-1] for word in words if tuple(tail[1 - len(word) :]) == word[:-1]]


class SlotTokenBans:
    """The slots whose requests exclude tokens."""

    def __init__(self, vocab_size: int, torch_device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.torch_device = torch_device
        self.forbidden: dict[int, Tensor] = {}  # slot -> bool [V]: tokens that are not allowed
        self.single: dict[int, Tensor] = {}  # slot -> int64: bad words of one token
        self.words: dict[int, BadWords] = {}  # slot -> bad words of several tokens

    def admit(self, admit: Admit) -> None:
        """Replaces what the slot excludes by what a new sequence does."""
        for held in (self.forbidden, self.single, self.words):
            held.pop(admit.slot, None)
        if (bans := admit.sampling.token_bans) is None:
            return
        if len(bans.allowed):
            self.forbidden[admit.slot] = upload(self._forbidden(bans), self.torch_device)
        if single := [word[0] for word in bans.bad_words if len(word) == 1]:
            self.single[admit.slot] = int64_tensor(single, self.torch_device)
        if words := bans.sequences:
            self.words[admit.slot] = BadWords(words, admit.history[admit.prompt_len :].tolist())

    def _forbidden(self, bans: TokenBans) -> np.ndarray:
        allowed = np.unpackbits(bans.allowed, bitorder="little", count=self.vocab_size)
        return allowed == 0

    def places(self, slots: list[int]) -> list[int]:
        """Places in `slots` of those that exclude tokens."""
        if not (self.forbidden or self.single or self.words):
            return []
        return [
            place
            for place, slot in enumerate(slots)
            if slot in self.forbidden or slot in self.single or slot in self.words
        ]

    def apply(
        self, logits: Tensor, places: list[int], slots: list[int], contexts: dict[int, list[int]]
    ) -> None:
        """Bans tokens, in place, in the rows `places` of logits [N, V], whose slots are `slots` [N].
        `contexts`: by row of logits, drafts that the sequence has at that place."""
        for place in places:
            row, slot = logits[place], slots[place]
            if slot in self.single:
                row.index_fill_(0, self.single[slot], BAD_WORD)
            if slot in self.words and (ids := self.words[slot].banned(contexts.get(place, []))):
                row.index_fill_(0, int64_tensor(ids, self.torch_device), BAD_WORD)
            if slot in self.forbidden:
                row.masked_fill_(self.forbidden[slot], NOT_ALLOWED)

    def took(self, slots: list[int], tokens: list[list[int]]) -> None:
        """The tokens that a step brings to each of `slots`."""
        for slot, taken in zip(slots, tokens, strict=True):
            if (words := self.words.get(slot)) is not None:
                words.extend(taken)
