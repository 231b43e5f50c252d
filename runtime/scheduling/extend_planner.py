"""How many known tokens of a sequence the next step computes: of a prompt, or of what a preempted sequence
had generated."""

from runtime.cache.sequence import Sequence
from runtime.scheduling.admission import Admission
from runtime.scheduling.chunking import Chunking
from runtime.scheduling.encodings import Encodings
from runtime.scheduling.flight import Fill
from runtime.scheduling.roster import Roster

LONG_STEPS = 4  # a prompt that would fill so many steps alone is long: it leaves room for others


class ExtendPlanner:
    """Hands out the tokens that a step has for known ones."""

    def __init__(
        self,
        roster: Roster,
        admission: Admission,
        chunking: Chunking | None,
        encodings: Encodings | None,
        *,
        samples: bool,
    ) -> None:
        """`chunking`: None: chunks are bound by tokens alone; `encodings`: None for a model of text alone;
        `samples`: a token is sampled behind the last known one (a diffusion model samples none)."""
        self.roster = roster
        self.admission = admission
        self.chunking = chunking
        self.encodings = encodings
        self._samples = samples

    def extend(self, sequence: Sequence, fill: Fill) -> None:
        """Plans as many of its known tokens as the step has left for it."""
        is_begun = sequence.id in fill.rows
        if sequence.computed_len == sequence.extend_len:
            return
        if not is_begun and len(fill.rows) == self.admission.max_prompts:
            return
        if self.chunking is not None and fill.rows and self.chunking.is_full:
            return
        is_long = sequence.extend_len - sequence.computed_len > LONG_STEPS * self.admission.max_step_tokens
        most = self._reach(sequence, is_begun=is_begun)
        count = min(most, self._room(sequence, fill, is_long=is_long))
        count = self._cut(sequence, count, most, fill, is_begun=is_begun)
        if count > 0:
            self._take(sequence, count, fill, is_long=is_long)
            self._advance(sequence, count)

    def _reach(self, sequence: Sequence, *, is_begun: bool) -> int:
        """Tokens that are known, as far as the pages of sliding windows reach."""
        start, end, window = sequence.computed_len, sequence.extend_len, self.roster.cache.window
        if window is None:
            return end - start
        if not is_begun:  # else tokens of this step still see what they have seen
            window.slide(sequence)
        return min(end, window.reach(sequence)) - start

    def _room(self, sequence: Sequence, fill: Fill, *, is_long: bool) -> int:
        """Tokens that the step has left for the sequence."""
        start, chunking = sequence.computed_len, self.chunking
        room = min(fill.left, fill.long_left) if is_long else fill.left
        if chunking is not None:
            _, first = fill.rows.get(sequence.id, (sequence, start))
            size = chunking.size(first, self.admission.max_step_tokens)
            room = chunking.room(start, min(room, size - (start - first)))
        embeds = sequence.request.embeds
        if embeds is not None and start < sequence.prompt_len and self.admission.has_chunks:
            room = min(room, fill.embeds_left // embeds.shape[1])
        return room

    def _cut(self, sequence: Sequence, count: int, most: int, fill: Fill, *, is_begun: bool) -> int:
        """`count` tokens, or as many as end where images, recurrent states and blocks let a chunk end. A step
        that has no other prompt takes up to `most` for an image that does not fit."""
        if self.encodings is not None and sequence.request.media and count > 0:
            before_s = self.encodings.planned_s
            count = self.encodings.cut(sequence, sequence.computed_len, count, count if fill.rows else most)
            if self.chunking is not None:
                self.chunking.spend(self.encodings.planned_s - before_s)
        if count > 0 and (states := self.roster.cache.states) is not None:
            count = states.cut(sequence, count, is_begun=is_begun)
        return count - count % sequence.block_size

    def _take(self, sequence: Sequence, count: int, fill: Fill, *, is_long: bool) -> None:
        """The step has so many tokens less for others."""
        start, embeds = sequence.computed_len, sequence.request.embeds
        if self.chunking is not None:
            self.chunking.take(start, count)
        fill.left = max(fill.left - count, 0)  # a whole image may be more
        if is_long:
            fill.long_left -= count
        if embeds is not None:
            fill.embeds_left -= min(count, max(sequence.prompt_len - start, 0)) * embeds.shape[1]
        fill.rows.setdefault(sequence.id, (sequence, start))

    def _advance(self, sequence: Sequence, count: int) -> None:
        """The sequence is computed that far, and what follows from it begins."""
        sequence.computed_len += count
        if (window := self.roster.cache.window) is not None:
            window.extend(sequence)
        if sequence.computed_len == sequence.extend_len and self._samples:
            sequence.in_flight += 1
            is_first = sequence.computed_len == sequence.prompt_len and not sequence.index
            if is_first and sequence.request.params.n > 1:
                self.roster.follow(sequence)
        self.roster.cache.publish(sequence)
