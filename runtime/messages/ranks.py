"""Messages of the rings between the scheduler and the ranks, apart from steps (messages/steps.py)."""

from typing import Any, Literal

import numpy as np
from msgspec import Struct

from runtime.messages.constraint import Grammar, GrammarSetup
from runtime.messages.lora import AdapterLoaded, AdapterSetup, LoadAdapter
from runtime.messages.memory import ChangeMemory, MemoryReport, UpdateWeights, WeightOffload
from runtime.messages.steps import StepPlan, StepResult


class Compiled(Struct, frozen=True, array_like=True):
    """Of the steps that are captured."""

    max_rows: int = 0  # most sequences of a decode step that does
    is_piecewise: bool = False  # steps in pieces do
    explains: bool = False  # on stderr

    @property
    def is_wanted(self) -> bool:
        return self.is_piecewise or self.max_rows > 0


DeviceOption = bool | int | float | str | list[int] | None


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
    # options that only this device has, as devices/<name>/options.py declares them
    device_options: dict[str, DeviceOption] = {}
    state_ratio: float = 0.0  # memory of recurrent layers' states for each byte of keys and values
    num_states: int | None = None  # of them, which overrides the ratio; None: as many as it gives
    # tokens of sliding-window layers for each of the full ones; 0: one pool of pages serves all layers
    window_ratio: float = 0.0
    host_bytes: int = 0  # of this rank's host tier; 0: none, unless host_ratio asks for one
    host_ratio: float = 0.0  # host pages for each device page, where host_bytes is 0
    # what stands outside in host memory: a row of LAYOUTS in devices/host_memory.py
    host_layout: str = "layer_first"
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
    # numbers of tokens for which steps with prompts may be captured, between their attentions
    piecewise_sizes: list[int] = []
    compiled: Compiled = Compiled()
    trace_folder: str = ""  # of traces of captures; empty: there are none
    adapters: AdapterSetup | None = None  # None: no adapters on these ranks
    offload_setup: WeightOffload = WeightOffload()  # of weights in host memory
    expert_steps: int | None = None  # that a record of expert load holds; None: nobody counts


class Capture(Struct, frozen=True, array_like=True, tag="capture"):
    """Capture decode steps of so many sequences, or what lies between attentions of steps of so many tokens
    (ranks/piecewise_graphs.py), between the steps before and behind; Captured answers it."""

    size: int
    unit: str = "sequences"  # or tokens


class Profile(Struct, frozen=True, kw_only=True, array_like=True, tag="profile"):
    """Record where the rank's time goes from now on; without a folder: write what was recorded."""

    folder: str = ""
    activities: tuple[str, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False
    num_steps: int | None = None  # after which it is written without being told


class PrepareGrammar(Struct, frozen=True, array_like=True, tag="prepare_grammar"):
    """A grammar will come with an Admit: begin to compile it beside the steps. None: some grammar will; load
    what compiles it."""

    grammar: Grammar | None


ExpertCountsAction = Literal["read", "start", "stop", "dump"]


class CountExperts(Struct, frozen=True, array_like=True, tag="count_experts"):
    """Tell the counts since the ranks started. Before: `start` forgets the record and records from here on,
    step by step; `stop` ends that; `dump` writes what is recorded to a file in the folder, and forgets it.
    ExpertCounts answers it, from rank 0."""

    id: int
    action: ExpertCountsAction
    folder: str = ""


class StopRank(Struct, frozen=True, array_like=True, tag="stop"):
    """No more records follow; the rank ends with exit code 0."""


RankCommand = (
    StepPlan | Capture | Profile | PrepareGrammar | LoadAdapter | CountExperts | ChangeMemory | UpdateWeights
)
"""What a rank does between its StartRank and its StopRank."""

ToRank = StartRank | RankCommand | StopRank


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
    # of sliding-window layers, padding page included; 0: they share the pages of the others
    num_window_pages: int = 0
    num_state_slots: int = 0  # of recurrent layers, padding slot included; 0: the model has none
    num_host_pages: int = 0  # of this rank's host tier; every one of them can be used
    host_page_bytes: int = 0
    # of each part of a host page (devices/host_memory.py); together host_page_bytes
    host_part_bytes: tuple[int, ...] = ()
    taken_bytes: int = 0  # in all, as the device sees it


class RankFailed(Struct, frozen=True, array_like=True, tag="failed"):
    """The rank cannot start or go on. `is_start_error` marks a message for the user (exit code 2)."""

    rank: int
    message: str
    is_start_error: bool


class Captured(Struct, frozen=True, array_like=True, tag="captured"):
    """What became of a Capture, on all ranks."""

    size: int
    seconds: float
    num_bytes: int  # of the device's memory that it took
    error: str  # why it failed; empty: it did not
    unit: str = "sequences"
    is_fatal: bool = False  # one rank failed where others wait for it: they end


class ExpertCounts(Struct, frozen=True, array_like=True, tag="expert_counts"):
    """Tokens of each expert since the ranks started."""

    id: int
    layers: tuple[int, ...]  # of the model, those with experts
    counts: np.ndarray  # int64 [layers * experts]
    num_steps: int  # that the record held
    file: str = ""  # that was written
    error: str = ""  # why none was


FromRank = (
    LoadProgress
    | RankReady
    | RankFailed
    | Captured
    | AdapterLoaded
    | ExpertCounts
    | MemoryReport
    | StepResult
)
