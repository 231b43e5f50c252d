"""One step: the plan that the scheduler broadcasts to the ranks, and the result that rank 0 reports.

Positions live on the ranks. A slot has a *length*: the number of its tokens whose keys and values are in the
cache. It starts at `Admit.length`, and each row of a plan continues at its slot's length:

    row      tokens that it computes                      tokens that it adds to the length
    decode   the slot's last token                        1
    verify   the slot's last token, then drafts           1 and the drafts that were accepted
    extend   tokens of the plan                           all
    block    tokens of the plan, the last of them a       all but those of the block
             block that is being filled in

So the next step can be submitted before it is known how many drafts the last one accepts. The scheduler keeps
bounds of each length, reserves pages for the most, and learns the rest from results.
"""

from enum import IntEnum, StrEnum

import numpy as np
from msgspec import Struct

from runtime.messages.lora import LoraAssignment
from runtime.messages.media import MediaRows
from runtime.messages.requests import GrammarConstraint, TokenBans
from runtime.messages.sampling import Processor

NO_INTS = np.empty(0, np.int32)
NO_GRIDS = np.empty(0, np.float64)

OWN_DRAFT = -1  # in place of a draft that the ranks make themselves


class SlotSampling(Struct, frozen=True, kw_only=True, array_like=True):
    """Sampling parameters of one slot, as the ranks keep them."""

    temperature: float
    top_p: float
    top_k: int  # 0: the whole vocabulary
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    # int64; with the token's position it decides the random number (layers/sampling/sampler.py)
    seed: int
    bias_ids: list[int]
    bias_values: list[float]
    stop_ids: list[int]  # not sampled while the sequence is shorter than min_len
    min_len: int  # length in tokens, prompt included
    top_logprobs: int  # -1: no logprobs; k: those of the sampled token and of k alternatives
    prompt_logprobs: int  # -1: none; k: as top_logprobs, of each token of the prompt
    processor: Processor | None = None
    # further tokens whose log probabilities are reported, behind the k alternatives
    logprob_ids: list[int] = []
    token_bans: TokenBans | None = None


class Admit(Struct, frozen=True, array_like=True):
    """A slot is taken by a new sequence. What the slot held before is gone."""

    slot: int
    sampling: SlotSampling
    prompt_len: int
    history: (
        np.ndarray
    )  # int32: all tokens known so far when penalties, a grammar or bad words need them, else empty
    grammar_constraint: GrammarConstraint | None = None
    second_at: int = 0  # position of the second text of a pair, as in Request.second_at
    lora_slot: int = -1  # LoRA slot of its adapter; -1: no adapter
    length: int = 0  # tokens whose keys and values are in its pages already
    # float64 [grids * 8], of tokens that stand in a grid (M-RoPE): place of the first one, frames, rows and
    # columns, positions from one frame to the next, and back, time and advance as in TokenGrid
    grids: np.ndarray = NO_GRIDS


class PageCopies(Struct, frozen=True, array_like=True):
    """Pages that change tiers in a step, before its forward: all saves (device to host), then all loads (host
    to device). Behind the forward come saves of pages that it has computed, where they are wanted at once.

    When a step's result is there, its saves are in host memory.
    """

    save_pages: np.ndarray  # int32 [S]: device pages
    save_hosts: np.ndarray  # int32 [S]: the host pages they are copied to
    load_hosts: np.ndarray  # int32 [L]
    load_pages: np.ndarray  # int32 [L]
    computed_pages: np.ndarray = NO_INTS  # int32 [C]: device pages that are saved behind the forward
    computed_hosts: np.ndarray = NO_INTS  # int32 [C]
    # bytes of each rank after which it says (PartsSaved) which layers of the computed pages are in host
    # memory; 0: the result says it of all
    notice_bytes: int = 0


class PartsSaved(Struct, frozen=True, array_like=True, tag="parts_saved"):
    """The first `num_parts` parts (devices/host_memory.py) of the pages that a step computes are in a rank's
    host memory."""

    group: int  # the attention group
    rank: int  # of the group, stage by stage
    step: int
    num_parts: int


class WindowPages(Struct, frozen=True, array_like=True):
    """Page-table updates of the sliding-window layers, where these have a page pool of their own.

    Page ids of that pool are unrelated to those of the full-attention layers. Page-table rows that no token
    of this or a later step can see may hold anything.
    """

    slots: np.ndarray  # int32 [P]: window_table[slots, rows] = ids
    rows: np.ndarray  # int32 [P]
    ids: np.ndarray  # int32 [P]


class StateCopies(Struct, frozen=True, array_like=True):
    """Copies of the states of recurrent layers, of which a rank keeps `num_state_slots` (RankReady); no plan
    uses number 0.

    A new sequence owns a state until its slot is taken by another sequence. Each row starts from the state
    that its sequence owns and leaves there the one after its last token. Loads come before the forward and
    read what earlier steps have left: a state may be read by one load and written by a later one. A load from
    0 makes the empty state, that of no tokens. Keeps come after the forward and read what this step has left.
    Neither loads nor keeps write to one state twice.

    Saves copy states to places in host memory, before all else, and read what earlier steps have left;
    fetches copy them back, with the loads. When a step's result is there, its saves are in host memory.

    Where it is not known which tokens of a row are accepted, a keep says at which length of the sequence: the
    state there is kept if the row brings the sequence to this length or beyond it, from below; else nothing
    is written.
    """

    slots: np.ndarray  # int32 [A]: state_slot[slots] = owned
    owned: np.ndarray  # int32 [A]
    load_from: np.ndarray  # int32 [L]
    load_to: np.ndarray  # int32 [L]
    keep_from: np.ndarray  # int32 [K]
    keep_to: np.ndarray  # int32 [K]
    # int32 [K]: lengths, for rows that sample after ALL of their tokens; -1 for the others. Empty: all are -1
    keep_at: np.ndarray = NO_INTS
    save_from: np.ndarray = NO_INTS  # int32 [S]: states
    save_to: np.ndarray = NO_INTS  # int32 [S]: places in host memory
    fetch_from: np.ndarray = NO_INTS  # int32 [F]
    fetch_to: np.ndarray = NO_INTS  # int32 [F]


class Samples(IntEnum):
    """After which of its tokens a row samples."""

    NONE = 0
    LAST = 1
    ALL = 2
    BLOCK = 3  # at each place of the block at its end (BlockSampling)


class BlockSampling(Struct, frozen=True, kw_only=True, array_like=True):
    """How the tokens of a diffusion model are computed. Blocks stand at multiples of `size`: a token attends
    to all blocks up to the end of its own. What is sampled at a place is the token of that very place."""

    size: int  # tokens of a block
    mask_id: int  # the token that stands where none is known; it is not sampled
    # taken from the logit of the token before each place; 0: nothing
    repeat_penalty: float = 0.0


class StepPlan(Struct, frozen=True, kw_only=True, array_like=True, tag="step"):
    """One step of `R` rows: `num_decodes` decode rows, then `num_verifies` verify rows, then extend rows.

    The module's docstring says what each kind computes. A verify row that samples after ALL of its tokens
    accepts the longest path of drafts that are what is sampled, and then the token sampled after the last of
    them. One that samples after the LAST has drafts that are known to be right (a grammar forces them): all
    are accepted. Drafts of a row form a chain, or with `draft_parents` a tree. A row whose drafts are all
    OWN_DRAFT samples after ALL of its tokens; the ranks put drafts of their draft model there, and choose
    what each follows.

    Steps of a diffusion model have extend rows alone, which begin and end at ends of blocks. One that samples
    at the places of a BLOCK ends with that block, whose keys and values are written and count for nothing:
    the next row of the slot begins where the block begins.

    Effects apply in this order: page copies, LoRA assignment, admits, page updates, loads of states, forward,
    keeps of states, sampling. A plan without rows only copies pages. Ranks run steps in the order of
    submission, so a page or slot given up by a step may be reused by the next one.
    """

    step: int
    num_decodes: int
    num_verifies: int = 0
    admits: list[Admit] = []
    slots: np.ndarray  # int32 [R]
    counts: np.ndarray  # int32 [R]: query tokens of the row; 1 for decodes
    samples: np.ndarray  # uint8 [R]: a value of Samples; LAST for decodes
    # int32: drafts of the verify rows (counts - 1 each), then the tokens of the extend rows
    token_ids: np.ndarray = NO_INTS
    page_slots: np.ndarray = NO_INTS  # int32 [P]: page updates: page_table[page_slots, page_rows] = page_ids
    page_rows: np.ndarray = NO_INTS  # int32 [P]
    page_ids: np.ndarray = NO_INTS  # int32 [P]
    # int32: for extend rows of slots with prompt_logprobs >= 0, `counts[r]` next tokens each; -1: unknown
    prompt_targets: np.ndarray = NO_INTS
    # int32, of each draft: which of the row's tokens it follows, 0 being the slot's last token and i the
    # row's
    # i-th draft; parents come before their children. None: each draft follows the token before it
    draft_parents: np.ndarray | None = None
    page_copies: PageCopies | None = None
    window: WindowPages | None = None  # None: no updates, or one pool for all layers
    states: StateCopies | None = None  # None: no copies, or no recurrent layers
    # int32: tokens of the step whose hidden states are reported, as places in the order of the rows
    shown: np.ndarray | None = None
    routed: np.ndarray | None = None  # int32: tokens of the step whose experts are reported, as such places
    embed_places: np.ndarray | None = None  # int32: tokens of the step whose embeddings are given ...
    embeds: np.ndarray | None = None  # float32 [places * hidden size]: ... and these embeddings
    media: MediaRows | None = None  # None: no token takes a row of an encoding
    lora_assignment: LoraAssignment | None = None
    # the draft model computes its own entries for the tokens of this step
    follows: bool = False
    blocks: BlockSampling | None = None  # of a diffusion model; None: others

    def kept_counts(self) -> np.ndarray:
        """int32 [R]: tokens that each row adds to its slot's length, where no drafts are verified."""
        if self.blocks is None:
            return self.counts
        return self.counts - self.blocks.size * (self.samples == Samples.BLOCK).astype(np.int32)


class GroupSteps(Struct, frozen=True, array_like=True, tag="group_steps"):
    """One step of all attention groups: the plan of each; None: it has nothing to compute. The groups number
    their steps apart."""

    step: int
    plans: list[StepPlan | None]


class Failing(StrEnum):
    """Why a step failed for one request alone."""

    GRAMMAR = "grammar"  # the grammar cannot be followed any more
    PROCESSOR = "processor"  # the logit processor raised
    NAN = "nan"  # its logits have a NaN, and it was asked to look for them


class PromptLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities of the next tokens of one extend row; `width` alternatives each, row after row."""

    slot: int
    width: int
    logprobs: np.ndarray  # float32 [n]; of prompt_targets; NaN where the target is -1
    top_ids: np.ndarray  # int32 [n * width]
    top_logprobs: np.ndarray  # float32 [n * width]


class StepResult(Struct, frozen=True, array_like=True, tag="result"):
    """What a step sampled: `N` tokens in the order of the rows that sample, `num_tokens` for each of them.

    Of a verify row that samples after ALL of its tokens these are the accepted drafts and the token after
    them, of one that samples at a BLOCK those of its places. Every other row that samples brings one token.
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
    # by place among the rows that sample: why the request ends; the tokens there mean nothing
    failed: dict[int, Failing] = {}
    vectors: np.ndarray | None = None  # float32 [N * size]: of a pooling model, in place of the N tokens
    hidden: np.ndarray | None = None  # float32: hidden states after the last norm, of StepPlan.shown
    experts: np.ndarray | None = None  # int32: experts of each layer, top_k each, of StepPlan.routed
    num_tokens: np.ndarray | None = None  # int32, of each row that samples; None: one each
    # by place among the rows that sample: the tokens that a grammar forces after the row's last one
    forced: dict[int, list[int]] = {}
    group: int = 0  # the attention group whose step it was
    encode_s: float = 0.0  # seconds of the encoder on what was encoded before this step
    # float32 [N]: probabilities of the tokens of BLOCK rows, as they were sampled; None: no such rows
    confidences: np.ndarray | None = None
