"""What a step that samples reports: which tensors go to the host, and what is read of their arrays."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from runtime.messages.steps import Failing, PromptLogprobs, StepPlan, StepResult
from runtime.ranks.prompt_logprobs import PromptRow
from runtime.ranks.sampled import Sampled

NO_TOKENS = np.empty(0, np.int32)
NO_LOGPROBS = (np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a step and what belongs to them, on the host."""

    token_ids: np.ndarray  # int32 [N]
    places: np.ndarray  # int64 [N]: where each was sampled, among the places where the step samples
    counts: np.ndarray | None  # int64, tokens of each row that samples; None: one each
    width: int  # alternatives of each token; -1: no log probabilities
    logprobs: tuple[np.ndarray, np.ndarray, np.ndarray]  # as in StepResult: of tokens, ids and alternatives
    nan_rows: list[int]  # among the rows that sample: those whose logits have a NaN
    prompt: list[PromptLogprobs]
    hidden: np.ndarray | None
    experts: np.ndarray | None

    def result(
        self, step: int, compute_s: float, failed: dict[int, Failing], forced: dict[int, list[int]]
    ) -> StepResult:
        """The step's result. `failed`: as in StepResult; `forced`: the tokens that grammars force, by the
        place after which they come."""
        return StepResult(
            step,
            self.token_ids,
            self.width,
            *self.logprobs,
            self.prompt,
            compute_s,
            failed | dict.fromkeys(self.nan_rows, Failing.NAN),
            hidden=self.hidden,
            experts=self.experts,
            num_tokens=None if self.counts is None else self.counts.astype(np.int32),
            forced=self._by_row(forced) if forced else {},
        )

    def _by_row(self, forced: dict[int, list[int]]) -> dict[int, list[int]]:
        """`forced` by the row whose last token is at the place."""
        ends = self.places if self.counts is None else self.places[self.counts.cumsum() - 1]
        return {row: forced[place] for row, place in enumerate(ends.tolist()) if place in forced}


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step has computed that its result needs."""

    plan: StepPlan
    sampled: Sampled
    prompt: list[PromptRow]
    shown: list[Tensor]  # hidden states, then experts, as far as the plan asks for them

    def tensors(self) -> list[Tensor]:
        """The tensors to fetch, in the order in which `read` takes their arrays."""
        sampled = self.sampled
        found = [sampled.tokens.int()]  # a copy: the next step may write to `tokens`
        found += [x for x in (sampled.has_nan, sampled.num_accepted, sampled.path) if x is not None]
        found += self.shown
        for logs in (*(row.logprobs for row in self.prompt), sampled.logprobs):
            if logs is not None:
                found += logs.chosen, logs.top_ids, logs.top
        return found

    def read(self, arrays: list[np.ndarray]) -> SampledTokens:
        """What the arrays of `tensors` say."""
        sampled, plan, come = self.sampled, self.plan, iter(arrays)
        token_ids = next(come)
        nan_rows = [] if sampled.has_nan is None else sampled.with_nan(next(come))
        places, counts = np.arange(len(token_ids)), None
        if sampled.num_accepted is not None:
            num = next(come)
            places, counts = sampled.accepted(num, None if sampled.path is None else next(come))
            token_ids = token_ids[places]
        hidden = None if plan.shown is None else next(come).ravel()
        experts = None if plan.routed is None else next(come).ravel()
        prompt = [row.result(next(come), next(come), next(come)) for row in self.prompt]
        width, logprobs = -1, NO_LOGPROBS
        if sampled.logprobs is not None:
            chosen, top_ids, top = come
            width = top_ids.shape[1]
            if counts is not None:
                chosen, top_ids, top = chosen[places], top_ids[places], top[places]
            logprobs = chosen.ravel(), top_ids.ravel(), top.ravel()
        return SampledTokens(token_ids, places, counts, width, logprobs, nan_rows, prompt, hidden, experts)
