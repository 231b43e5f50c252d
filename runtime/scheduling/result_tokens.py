"""The tokens of a step's result, on their way to their sequences."""

from collections.abc import Callable

from runtime.cache.sequence import Sequence
from runtime.messages.requests import FinishReason, TokenLogprob
from runtime.messages.scheduler import Ended, StepTokens
from runtime.messages.steps import StepResult
from runtime.scheduling import logprobs
from runtime.scheduling.diffusion.algorithms import Diffusion
from runtime.scheduling.draft_planner import DraftPlanner
from runtime.scheduling.drafts import split_rows, take
from runtime.scheduling.encodings import encoded_for
from runtime.scheduling.flight import Flight

EndSequence = Callable[[Sequence, FinishReason, int | None, list[Ended]], None]


class ResultTokens:
    """Appends tokens to their sequences, and ends these at stop tokens and at their maximum length."""

    def __init__(self, drafts: DraftPlanner, end: EndSequence) -> None:
        """`drafts` gets the tokens that a grammar forces after those of a sequence, and what became of
        drafts; `end` ends a sequence: with its reason, the end-of-text or stop token that matched, and the
        list that it is appended to."""
        self._drafts = drafts
        self._end = end

    def take(self, flight: Flight, result: StepResult, step: StepTokens) -> None:
        """One token for each sequence that was sampled."""
        ids, tokens, ended = step.sequence_ids, step.token_ids, step.ended
        for row, (sequence, token) in enumerate(zip(flight.sampled, result.token_ids.tolist(), strict=True)):
            sequence.in_flight -= 1
            if sequence.is_finished:
                continue
            if len(sequence.tokens) == sequence.prompt_len:
                self._first_token(sequence, step)
            sequence.tokens.append(token)
            ids.append(sequence.id)
            tokens.append(token)
            if result.width >= 0 and sequence.request.params.logprobs:
                step.logprobs[sequence.id] = logprobs.of_tokens(result, row, 1, sequence.request.params)
            if result.forced and (forced := result.forced.get(row)):
                self._drafts.force(sequence, forced)
            if token in sequence.stop_ids:
                self._end(sequence, FinishReason.STOP, token, ended)
            elif len(sequence.tokens) >= sequence.max_len:
                self._end(sequence, FinishReason.LENGTH, None, ended)

    def take_first(
        self, sequence: Sequence, token: int, cached_len: int, logprob: TokenLogprob | None
    ) -> StepTokens:
        """The first token of a waiting sequence, which another server has sampled; `cached_len`: tokens of
        the prompt whose pages are there or come."""
        step = StepTokens([sequence.id], [token], [], {}, {}, cached={sequence.id: cached_len})
        if logprob is not None:
            step.logprobs[sequence.id] = [logprob]
        sequence.tokens.append(token)
        is_stop = token in sequence.stop_ids
        if is_stop or len(sequence.tokens) >= sequence.max_len:
            sequence.first_cached_len = cached_len  # it is never admitted
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            self._end(sequence, reason, token if is_stop else None, step.ended)
        return step

    def take_verified(self, flight: Flight, result: StepResult, step: StepTokens) -> None:
        """One token or more for each sequence that was sampled; what comes behind its end is dropped."""
        drafts = {verified.row: verified.draft for verified in flight.verified}
        at = 0  # where the row's tokens begin in the result
        counts = [1] * len(flight.sampled) if result.num_tokens is None else result.num_tokens.tolist()
        for row, (sequence, tokens) in enumerate(
            zip(flight.sampled, split_rows(result, flight.verified), strict=True)
        ):
            first, at = at, at + counts[row]
            if (draft := drafts.get(row)) is None:
                sequence.in_flight -= 1
            else:
                self._drafts.landed(sequence, draft, len(tokens))
                if sequence.state is not None and not draft.is_sure:
                    sequence.state.landed(len(sequence.tokens) - 1, len(tokens))
            if sequence.is_finished:
                continue
            taken = self._append(sequence, tokens, step)
            if draft is not None and not draft.is_sure:
                step.verified[sequence.id] = (len(draft.tokens), min(len(tokens) - 1, len(taken)))
            if result.width >= 0 and sequence.request.params.logprobs:
                step.logprobs[sequence.id] = logprobs.of_tokens(
                    result, first, len(taken), sequence.request.params
                )
            if (forced := result.forced.get(row)) and len(taken) == len(tokens):
                self._drafts.force(sequence, forced)
            self._end_behind(sequence, taken[-1], step)

    def take_blocks(self, flight: Flight, result: StepResult, step: StepTokens, diffusion: Diffusion) -> None:
        """What was found at the places of each sequence's block. A block's tokens come when it is complete;
        what comes behind the sequence's end is dropped."""
        size, tokens = diffusion.size, result.token_ids.tolist()
        confidences = [] if result.confidences is None else result.confidences.tolist()
        for row, sequence in enumerate(flight.sampled):
            sequence.in_flight -= 1
            block, places = sequence.block, slice(row * size, (row + 1) * size)
            if sequence.is_finished or block is None:
                continue
            if diffusion.algorithm.fill(block, diffusion.mask_id, tokens[places], confidences[places]):
                sequence.block = None
                taken = self._append(sequence, block.tokens[block.num_given :], step)
                self._end_behind(sequence, taken[-1], step)

    def _append(self, sequence: Sequence, tokens: list[int], step: StepTokens) -> list[int]:
        """Appends tokens to a sequence, as far as they come before its end. -> these"""
        if len(sequence.tokens) == sequence.prompt_len:
            self._first_token(sequence, step)
        taken = take(sequence, tokens)
        step.sequence_ids.append(sequence.id)
        step.token_ids.append(taken[0])
        if len(taken) > 1:
            step.more[sequence.id] = taken[1:]
        return taken

    def _end_behind(self, sequence: Sequence, token: int, step: StepTokens) -> None:
        """Ends a sequence whose last token is `token`, if it is one that ends it, or the last that fits."""
        if token in sequence.stop_ids:
            self._end(sequence, FinishReason.STOP, token, step.ended)
        elif len(sequence.tokens) >= sequence.max_len:
            self._end(sequence, FinishReason.LENGTH, None, step.ended)

    def _first_token(self, sequence: Sequence, step: StepTokens) -> None:
        """What is reported with the first token of an answer."""
        step.cached[sequence.id] = sequence.first_cached_len
        if sequence.request.media:
            step.encoded.update(encoded_for([sequence]))
        if sequence.loaded_len:
            step.loaded[sequence.id] = sequence.first_sources
