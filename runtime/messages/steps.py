"""A step: the plan that the scheduler broadcasts to the ranks, and the result that rank 0 reports."""

from enum import StrEnum

import numpy as np
from msgspec import Struct

from runtime.messages.lora import LoraAssignment
from runtime.messages.requests import GrammarConstraint
from runtime.messages.sampling import Processor


class SlotSampling(Struct, frozen=True, kw_only=True, array_like=True):
    """Sampling state of one slot, as the ranks keep it."""

    temperature: float
    top_p: float
    top_k: int  # 0: all
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    # int64; with the token's position it decides the random number (see layers/sampling/sampler.py)
    seed: int
    bias_ids: list[int]
    bias_values: list[float]
    stop_ids: list[int]  # not sampled while the sequence is shorter than min_len
    min_len: int  # length in tokens, prompt included
    top_logprobs: int  # -1: no logprobs; k: the token's own and k alternatives
    prompt_logprobs: int  # -1: none
    processor: Processor | None = None
    # whose log probabilities stand behind those of the k alternatives, where there are any
    logprob_ids: list[int] = []


class Admit(Struct, frozen=True, array_like=True):
    """A slot is taken by a new sequence. What the slot held before is gone."""

    slot: int
    sampling: SlotSampling
    prompt_len: int
    history: np.ndarray  # int32: all tokens known so far when penalties or a grammar need them, else empty
    grammar_constraint: GrammarConstraint | None = None
    second_at: int = 0  # see Request
    lora_slot: int = -1  # where its adapter sits; -1: it has none


class PageCopies(Struct, frozen=True, array_like=True):
    """Pages that change tiers in a step, before its forward: all saves (device to host), then all loads (host
    to device).

    A page that a step computes can be saved by a later step only. When a step's result is there, its saves
    are in host memory.
    """

    save_pages: np.ndarray  # int32 [S]: device pages
    save_hosts: np.ndarray  # int32 [S]: the host pages they are copied to
    load_hosts: np.ndarray  # int32 [L]
    load_pages: np.ndarray  # int32 [L]


class WindowPages(Struct, frozen=True, array_like=True):
    """Page updates of the sliding-window layers, where they have a pool of their own: their page ids have
    nothing to do with those of the full layers. Rows that no token of this or a later step can see may hold
    anything."""

    slots: np.ndarray  # int32 [P]: window_table[slots, rows] = ids
    rows: np.ndarray  # int32 [P]
    ids: np.ndarray  # int32 [P]


class StateCopies(Struct, frozen=True, array_like=True):
    """What becomes of the states of recurrent layers, of which a rank keeps `num_state_slots` (RankReady); no
    plan uses number 0.

    A newcomer owns a state until its slot is taken by another sequence. Each row starts from the state that
    its sequence owns and leaves there the one after its last token. Before the forward come the loads, which
    read what the steps before have left: a state may be read by one load and written by a later one. A load
    from 0 makes the empty state, that of no tokens. After the forward come the keeps, which read what this
    step has left. Neither loads nor keeps write to one state twice.
    """

    slots: np.ndarray  # int32 [A]: state_slot[slots] = owned
    owned: np.ndarray  # int32 [A]
    load_from: np.ndarray  # int32 [L]
    load_to: np.ndarray  # int32 [L]
    keep_from: np.ndarray  # int32 [K]
    keep_to: np.ndarray  # int32 [K]


class StepPlan(Struct, frozen=True, array_like=True, tag="step"):
    """One step: `R` rows, the first `num_decodes` of them decodes.

    A decode row computes one token, the last one sampled in its slot, which only the ranks know. An extend
    row computes `counts[r]` known tokens, which stand in `token_ids` one row after the other. Effects apply
    in this order: moves, seating, admits, page updates, loads of states, forward, keeps of states, sample. A
    plan without rows only moves. Ranks run steps in the order of submission, so a page or slot given up by a
    step may be reused by the next one.
    """

    step: int
    num_decodes: int
    admits: list[Admit]
    slots: np.ndarray  # int32 [R]
    starts: np.ndarray  # int32 [R]: position of the row's first token
    counts: np.ndarray  # int32 [R]: tokens of the row; 1 for decodes
    samples: np.ndarray  # uint8 [R]: 1: sample a token after the row's last
    token_ids: np.ndarray  # int32 [sum of counts of the extend rows]
    page_slots: np.ndarray  # int32 [P]: page updates: page_table[page_slots, page_rows] = page_ids
    page_rows: np.ndarray  # int32 [P]
    page_ids: np.ndarray  # int32 [P]
    # int32: for extend rows of slots with prompt_logprobs >= 0, `counts[r]` next tokens each; -1: unknown
    prompt_targets: np.ndarray
    page_copies: PageCopies | None = None
    window: WindowPages | None = None  # None: no updates, or one pool for all layers
    states: StateCopies | None = None  # None: nothing to do, or no recurrent layers
    # int32: tokens of the step (decodes' first) whose hidden states are wanted
    shown: np.ndarray | None = None
    embed_places: np.ndarray | None = None  # int32: tokens of the step that are embedded ...
    embeds: np.ndarray | None = None  # float32 [places * hidden size] ... as these
    lora_assignment: LoraAssignment | None = None  # of adapters


class Failing(StrEnum):
    """What only its own request fails of."""

    GRAMMAR = "grammar"  # it can't be followed any more
    PROCESSOR = "processor"  # its logit processor raised


class PromptLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities of the next tokens of one extend row; `width` alternatives each, row after row."""

    slot: int
    width: int
    logprobs: np.ndarray  # float32 [n]; of prompt_targets; NaN where the target is -1
    top_ids: np.ndarray  # int32 [n * width]
    top_logprobs: np.ndarray  # float32 [n * width]


class StepResult(Struct, frozen=True, array_like=True, tag="result"):
    """What a step sampled: `N` tokens, for each row with samples == 1, in row order: one, or as many as
    `num_tokens` says.

    A row that brings a run of n tokens has computed nothing of it. The rows of that sequence which are in
    flight then compute its tokens one by one, and what they sample is known already; the scheduler lets the
    rest follow as an extend row.
    """

    step: int
    token_ids: np.ndarray  # int32 [N]
    # alternatives per token: the largest top_logprobs + logprob_ids among the step's rows; -1: no logprobs in
    # this step
    width: int
    logprobs: np.ndarray  # float32 [N] or empty
    top_ids: np.ndarray  # int32 [N * width] or empty
    top_logprobs: np.ndarray  # float32 [N * width] or empty
    prompt: list[PromptLogprobs]
    compute_s: float  # seconds that the rank spent on the step
    # by place among those rows: what its request ends of; the token there means nothing
    failed: dict[int, Failing] = {}
    vectors: np.ndarray | None = None  # float32 [N * size]: of a model that pools, in place of the N tokens
    # float32: hidden states behind the last norm, of the tokens that the plan wants them of
    hidden: np.ndarray | None = None
    num_tokens: np.ndarray | None = None  # int32: of each row that samples; None: one each
