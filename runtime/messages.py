"""Every message of every channel and ring. Read this first: it is all that can happen.

    client ─ Ask ─► tokenizer ─ Request ─► scheduler ─ StepPlan ─► ranks       (shared-memory ring, broadcast)
       ▲              router ─ Abort ─────►    │  ◄── StepResult ─── rank 0    (shared-memory ring)
       └─ Delta ─ detokenizer ◄─ StepTokens ───┘
                      └────────── Stopped ─────►  (a stop string was found in the text)

Channels carry the objects themselves. Rings carry msgpack headers and raw arrays (see wire.py); their messages are
array_like to be small. Arrays are one-dimensional numpy arrays; the comment gives dtype and shape.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from runtime.adapters.wire import AdapterLoaded, AdapterSetup, LoadAdapter, Seating
from runtime.captured import Capture, Captured
from runtime.compiled import Compiled
from runtime.constraint import Grammar, GrammarSetup
from runtime.errors import RequestError
from runtime.expert_load import CountExperts, ExpertCounts
from runtime.moves import Moves, StateMoves, WindowPages
from runtime.occupation import Hold, Hosting, Occupied, Occupy, Renew, Unhold
from runtime.prompts import Chat, Embeds, Infill, Pair, Text, Tokens
from runtime.request import NOTHING_LOADED, AdapterRef, FinishReason, Guide, Loaded, Request, TokenLogprob
from runtime.sampling import Processor, SamplingParams

# ── client → router → tokenizer ────────────────────────────────────────────────────────────────────────────────


Prompt = Text | Tokens | Chat | Infill | Pair | Embeds


class SessionParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in a session a request belongs (sessions.py), in SGLang's words."""

    id: str
    rid: str | None = None  # the request that it goes on from; None: a new beginning
    offset: int | None = None  # tokens of that one's text to keep; negative: to leave off at its end; None, 0: all
    replace: bool | None = None  # what went on from there before ends and is forgotten
    drop_previous_output: bool | None = None  # go on from the prompt alone


class Before(Struct):
    """The tokens before a session's request; `prompt_ids` is set by the tokenizer, to all that the request begins with."""

    token_ids: list[int]
    prompt_ids: list[int] = []


class Ask(Struct, frozen=True, kw_only=True):
    """A request as it came in, before tokenisation."""

    id: str
    prompt: Prompt
    params: SamplingParams
    arrival_s: float
    priority: int | None = None  # this and the next: see Request
    is_idle: bool = False
    tenant: str = ""
    routing_key: str = ""
    cache_salt: str = ""  # the prefix cache is shared with requests of the same salt only
    adapter: str = ""  # by name; "": the plain model
    adapter_ref: AdapterRef | None = None  # the same, as it is now: set at the door
    queue_timeout_s: float | None = None
    timeout_s: float | None = None
    session: SessionParams | None = None
    before: Before | None = None  # of its session: set at the door
    marks: tuple[str, ...] = ()  # see Request
    pools: bool = False  # it wants a vector, not text
    truncate: int | None = None  # keep so many tokens of the prompt; -1: as many as fit; None: all, or refuse. Only with `pools`


# ── router, detokenizer → scheduler ────────────────────────────────────────────────────────────────────────────


class Abort(Struct, frozen=True, tag=True):
    """The client is gone or has asked to stop: finish every sequence of this request. Unknown ids are ignored."""

    request_id: str


class Stopped(Struct, frozen=True, tag=True):
    """The detokenizer has ended these sequences (stop string found): free their pages."""

    sequence_ids: list[int]


class Arrive(Struct, frozen=True, tag=True):
    """A tokenised request joins the waiting queue."""

    request: Request


PauseMode = Literal["abort", "retract", "in_place"]  # what becomes of the sequences that run: they end, wait again, or stay where they are


class Pause(Struct, frozen=True, tag=True):
    """Plan no steps until Continue. `answer` is called when no step is in flight any more."""

    mode: PauseMode
    answer: Callable[[None], None]


class Continue(Struct, frozen=True, tag=True):
    """Plan steps again."""


class Unload(Struct, frozen=True, tag=True):
    """No request has this adapter any more: ranks may forget it."""

    adapter: int


class Flush(Struct, frozen=True, tag=True):
    """Empty the prefix cache. `answer` gets the number of pages that were freed, or why that cannot be done now."""

    answer: Callable[[int | RequestError], None]


ToScheduler = Arrive | Abort | Stopped | Pause | Continue | Hold | Unhold | Flush | Unload

# ── scheduler → detokenizer, one message a step ────────────────────────────────────────────────────────────────


class Opened(Struct, frozen=True, tag=True):
    """Sequences that exist from now on: the `n` sequences of a request, ids in order of their index."""

    request: Request
    sequence_ids: list[int]


class Ended(Struct, frozen=True):
    """A sequence has ended with the last token given for it (or without one)."""

    sequence_id: int
    reason: FinishReason
    matched: int | None  # the stop token id, unless it is the model's own eos
    cached_tokens: int
    loaded: Loaded = NOTHING_LOADED  # of them


class StepTokens(Struct, frozen=True, tag=True):
    """The tokens of one step, in parallel lists, and the sequences that end with it."""

    sequence_ids: list[int]
    token_ids: list[int]
    ended: list[Ended]
    logprobs: dict[int, list[TokenLogprob]]  # by sequence id, where asked for: of each of its tokens
    prompt_logprobs: dict[int, list[TokenLogprob]]  # by sequence id, when the prompt is complete
    cached: dict[int, int] = {}  # by sequence id, with its first token: prompt tokens found in the prefix cache
    loaded: dict[int, Loaded] = {}  # of them, where there are any that the device did not have
    vectors: dict[int, np.ndarray] = {}  # by sequence id, of sequences that end with one in place of tokens
    hidden: dict[int, np.ndarray] = {}  # by sequence id, where asked for: float32 [n, size], the prompt's with the first token
    more: dict[int, list[int]] = {}  # by sequence id: tokens that follow the one in `token_ids`, where a step brought several


class Refused(Struct, frozen=True, tag=True):
    """The scheduler turned a request down (`status` 400, 429 or 503 with a safe message), or gave it up because it kills the ranks (500);
    nothing of it is running."""

    request_id: str
    status: int
    message: str
    param: str | None = None


ToDetokenizer = Opened | StepTokens | Refused

# ── scheduler → ranks (broadcast ring) ─────────────────────────────────────────────────────────────────────────


class StartRank(Struct, frozen=True, kw_only=True, array_like=True, tag="start"):
    """The first record of a ring: all that a rank must know to load its share of the model."""

    device: str  # folder of runtime/devices
    model_path: str
    dtype: str  # auto, float32, bfloat16, float16
    load_format: str  # auto, safetensors, dummy
    tp_size: int
    page_size: int
    max_slots: int  # sequences that can run at once
    max_len: int  # longest sequence in tokens
    max_step_tokens: int  # most tokens of one step
    memory_fraction: float  # of the device's free memory, for weights and pages together
    max_total_tokens: int | None  # None: as many as memory_fraction allows
    num_threads: int | None  # CPU threads of a rank; None: the device decides
    rendezvous: str  # where the ranks of one start meet (a file path), unused when tp_size is 1
    seed: int
    environment: dict[str, str] = {}  # variables of the rank's process
    numa_nodes: tuple[int, ...] = ()  # whose cores ranks stay on: of each rank, or one of all; none: anywhere
    device_options: dict[str, Any] = {}  # what only this device reads, e.g. the null device's timing model
    state_ratio: float = 0.0  # memory of recurrent layers' states for each byte of keys and values
    num_states: int | None = None  # of them, which overrides the ratio; None: as many as it gives
    window_ratio: float = 0.0  # tokens of sliding-window layers for each of the full ones; 0: one pool of pages serves all layers
    host_bytes: int = 0  # of this rank's host tier; 0: none, unless host_ratio asks for one
    host_ratio: float = 0.0  # host pages for each device page, where host_bytes is 0
    host_layout: str = "layer_first"  # what stands outside in host memory: a row of LAYOUTS in devices/host.py
    host_copies: str = "kernel"  # or direct: what copies pages to and from it, on devices that have both
    host_fds: list[int] = []  # of each rank's host memory; set where the ranks are started
    ep_size: int = 1  # groups of ranks that whole experts are spread over
    exchange: str = "none"  # of tokens between them, --moe-a2a-backend, and the next is --deepep-mode
    exchange_mode: str = "auto"
    kv_dtype: str = "auto"  # of the pages: bfloat16, fp8_e4m3, fp8_e5m2; auto: as `dtype`
    grammar: GrammarSetup | None = None  # None: no grammars on these ranks
    processors: list[str] = []  # classes that change logits: package.module:Class
    config_overrides: dict[str, Any] = {}  # --json-model-override-args
    has_wide_head: bool = False  # logits are computed in float32 whatever the dtype
    is_embedding: bool = False  # this and the next: see models/tasks.py
    pooling: str = "auto"
    quantization: str | None = None  # --quantization
    graph_sizes: list[int] = []  # numbers of sequences for which decode steps may be captured
    graph_pads: bool = True  # a graph serves fewer sequences than it has rows
    piece_sizes: list[int] = []  # numbers of tokens for which steps with prompts may be captured, between their attentions
    compiled: Compiled = Compiled()
    trace_folder: str = ""  # of traces of captures; empty: there are none
    adapters: AdapterSetup | None = None  # None: no adapters on these ranks
    hosting: Hosting = Hosting()  # of weights in host memory
    expert_steps: int | None = None  # that a record of expert load holds; None: nobody counts


class SlotSampling(Struct, frozen=True, kw_only=True, array_like=True):
    """Sampling state of one slot, as the ranks keep it."""

    temperature: float
    top_p: float
    top_k: int  # 0: all
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int  # int64; with the token's position it decides the random number (see layers/sampler.py)
    bias_ids: list[int]
    bias_values: list[float]
    stop_ids: list[int]  # not sampled while the sequence is shorter than min_len
    min_len: int  # length in tokens, prompt included
    top_logprobs: int  # -1: no logprobs; k: the token's own and k alternatives
    prompt_logprobs: int  # -1: none
    processor: Processor | None = None
    logprob_ids: list[int] = []  # whose log probabilities stand behind those of the k alternatives, where there are any


class Admit(Struct, frozen=True, array_like=True):
    """A slot is taken by a new sequence. What the slot held before is gone."""

    slot: int
    sampling: SlotSampling
    prompt_len: int
    history: np.ndarray  # int32: all tokens known so far when penalties or a grammar need them, else empty
    guide: Guide | None = None
    second_at: int = 0  # see Request
    seat: int = -1  # where its adapter sits; -1: it has none


class StepPlan(Struct, frozen=True, array_like=True, tag="step"):
    """One step: `R` rows, the first `num_decodes` of them decodes.

    A decode row computes one token, the last one sampled in its slot, which only the ranks know.
    An extend row computes `counts[r]` known tokens, which stand in `token_ids` one row after the other.
    Effects apply in this order: moves, seating, admits, page updates, loads of states, forward, keeps of states, sample. A plan without
    rows only moves. Ranks run steps in the order of submission, so a page or slot given up by a step may be reused by the next one.
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
    prompt_targets: np.ndarray  # int32: for extend rows of slots with prompt_logprobs >= 0, `counts[r]` next tokens each; -1: unknown
    moves: Moves | None = None
    window: WindowPages | None = None  # None: no updates, or one pool for all layers
    states: StateMoves | None = None  # None: nothing to do, or no recurrent layers
    shown: np.ndarray | None = None  # int32: tokens of the step (decodes' first) whose hidden states are wanted
    embed_places: np.ndarray | None = None  # int32: tokens of the step that are embedded ...
    embeds: np.ndarray | None = None  # float32 [places * hidden size] ... as these
    seating: Seating | None = None  # of adapters


class Profile(Struct, frozen=True, kw_only=True, array_like=True, tag="profile"):
    """Record where the rank's time goes from now on; without a folder: write what was recorded."""

    folder: str = ""
    activities: tuple[str, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False
    num_steps: int | None = None  # after which it is written without being told


class Prepare(Struct, frozen=True, array_like=True, tag="prepare"):
    """A grammar will come with an Admit: begin to compile it beside the steps. None: some grammar will; load what compiles it."""

    grammar: Grammar | None


class StopRank(Struct, frozen=True, array_like=True, tag="stop"):
    """No more records follow; the rank ends with exit code 0."""


ToRank = StartRank | StepPlan | Capture | Profile | Prepare | LoadAdapter | CountExperts | Occupy | Renew | StopRank

# ── ranks → scheduler (a ring per rank; only rank 0 reports steps) ─────────────────────────────────────────────


class LoadProgress(Struct, frozen=True, array_like=True, tag="progress"):
    """What a rank is doing while it starts: a phase name and how much of it is done."""

    rank: int
    phase: str
    fraction: float


class RankReady(Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """The rank can take steps. Sizes are what it measured."""

    rank: int
    num_pages: int  # pages this rank can hold; page 0 is its padding page and never used by a plan
    weights_bytes: int
    pages_bytes: int  # of both pools
    device_name: str
    phases_s: dict[str, float]  # seconds of each start-up phase
    num_window_pages: int = 0  # of sliding-window layers, padding page included; 0: they share the pages of the others
    num_state_slots: int = 0  # of recurrent layers, padding slot included; 0: the model has none
    num_host_pages: int = 0  # of this rank's host tier; every one of them can be used
    host_page_bytes: int = 0
    host_part_bytes: tuple[int, ...] = ()  # of each part of a host page (devices/host.py); together host_page_bytes
    taken_bytes: int = 0  # in all, as the device sees it


class RankFailed(Struct, frozen=True, array_like=True, tag="failed"):
    """The rank cannot start or go on. `is_start_error` marks a message for the user (exit code 2)."""

    rank: int
    message: str
    is_start_error: bool


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
    """What a step sampled: `N` tokens, for each row with samples == 1, in row order: one, or as many as `num_tokens` says.

    A row that brings a run of n tokens has computed nothing of it. The rows of that sequence which are in flight then compute its tokens
    one by one, and what they sample is known already; the scheduler lets the rest follow as an extend row.
    """

    step: int
    token_ids: np.ndarray  # int32 [N]
    width: int  # alternatives per token: the largest top_logprobs + logprob_ids among the step's rows; -1: no logprobs in this step
    logprobs: np.ndarray  # float32 [N] or empty
    top_ids: np.ndarray  # int32 [N * width] or empty
    top_logprobs: np.ndarray  # float32 [N * width] or empty
    prompt: list[PromptLogprobs]
    compute_s: float  # seconds that the rank spent on the step
    failed: dict[int, Failing] = {}  # by place among those rows: what its request ends of; the token there means nothing
    vectors: np.ndarray | None = None  # float32 [N * size]: of a model that pools, in place of the N tokens
    hidden: np.ndarray | None = None  # float32: hidden states behind the last norm, of the tokens that the plan wants them of
    num_tokens: np.ndarray | None = None  # int32: of each row that samples; None: one each


FromRank = LoadProgress | RankReady | RankFailed | Captured | AdapterLoaded | ExpertCounts | Occupied | StepResult
