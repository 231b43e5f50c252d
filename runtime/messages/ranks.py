"""Messages between the event-loop process and the ranks, except steps (messages/steps.py)."""

from typing import Literal

import numpy as np
from msgspec import Struct

from runtime.json_value import JsonDict
from runtime.messages.attention_layout import AttentionLayout
from runtime.messages.constraint import Grammar, GrammarSetup
from runtime.messages.diagnosis import NOTHING, Diagnosis
from runtime.messages.experts import ExpertPlaces, ExpertsPlaced, MoveExperts, ReadExperts
from runtime.messages.lora import AdapterLoaded, AdapterSetup, LoadAdapter
from runtime.messages.media import AlignSound, Encode, EncodeRows, RowsEncoded
from runtime.messages.memory import ChangeMemory, MemoryReport, UpdateWeights, WeightOffload
from runtime.messages.multiplexing import Multiplexing
from runtime.messages.prompt_split import PromptSplit
from runtime.messages.speculation import Speculation
from runtime.messages.stages import Stage
from runtime.messages.steps import GroupSteps, PartsSaved, StepPlan, StepResult


class CompileConfig(Struct, frozen=True, array_like=True):
    """Which captured steps run functions compiled by torch.compile."""

    max_rows: int = 0  # decode steps of up to so many sequences
    is_piecewise: bool = False  # piecewise graphs
    explains: bool = False  # graph breaks and recompilations are logged to stderr

    @property
    def is_enabled(self) -> bool:
        """Whether any step runs compiled functions."""
        return self.is_piecewise or self.max_rows > 0


class Reading(Struct, frozen=True, array_like=True):
    """How files of weights are read."""

    num_threads: int = 4  # that read one tensor
    uses_mmap: bool = True  # ranges of columns are read from the mapped file


class KeepWeights(Struct, frozen=True, array_like=True):
    """Where packed weights are kept from one start to the next."""

    folder: str = ""  # empty: they are not
    max_bytes: int = 0  # of all files there


DeviceOption = bool | int | float | str | list[int] | None


class ProcessSetup(Struct, frozen=True, kw_only=True):
    """What the processes of ranks are started with, before it is known what they load: fields of
    StartRank."""

    device: str
    num_ranks: int
    num_threads: int | None
    environment: dict[str, str] = {}
    host_fds: list[int] = []
    state_fds: list[int] = []


class StepOverlap(Struct, frozen=True, array_like=True):
    """What is computed while ranks exchange something."""

    two_batches: bool = False  # a step's tokens are two micro-batches, which are computed in turns
    # least share of the tokens that the smaller one has if they are cut between rows; 0: they always are
    threshold: float = 0.48
    shared_experts: bool = False  # while tokens travel to their routed experts


Encoding = Literal["none", "whole", "shared", "alone", "elsewhere"]


class StartRank(Struct, frozen=True, kw_only=True, array_like=True, tag="start"):
    """The first record of a ring: everything that a rank needs to load its share of the model."""

    device: str  # cpu, cuda, npu, null
    model_path: str
    dtype: str  # auto, float32, bfloat16, float16
    load_format: str  # --load-format
    tp_size: int
    page_size: int
    max_slots: int  # sequences that can run at once
    max_len: int  # longest sequence in tokens
    max_step_tokens: int  # most tokens of one step
    memory_fraction: float  # of the device's free memory, for weights and pages together
    max_total_tokens: int | None  # None: as many as memory_fraction allows
    num_threads: int | None  # CPU threads of a rank; None: the device decides
    # where the ranks of one start meet (devices/torch_collectives.py); unused by one rank
    rendezvous: str = ""
    seed: int
    pp_size: int = 1  # stages of the pipeline, each of tp_size ranks
    attention_groups: int = (
        1  # of ranks with requests of their own; the other layers are of all tp_size ranks
    )
    attention_parts: int = 1  # ranks that share each sequence in attention
    prompt_split: PromptSplit | None = None  # between these ranks; None: there is one
    replicates_dense: bool = False  # dense layers of a model with experts are whole on each rank
    scatters_inputs: bool = False  # each rank has a shard of a step's tokens between attentions
    has_group_heads: bool = False  # the head is divided over each attention group, not over all ranks
    steps_in_flight: int = 2  # at most, plans whose results have not come
    environment: dict[str, str] = {}  # environment variables of the rank's process
    # NUMA nodes of this replica's ranks, or one for all; empty: any
    numa_nodes: tuple[int, ...] = ()
    num_nodes: int = 1  # that share the ranks of this replica: the k-th of them has the k-th part
    num_replicas: int = 1  # that have ranks on each node
    first_device: int = 0  # number of accelerators that the replicas before this one take
    # options that only this device has, as devices/<name>/options.py declares them
    device_options: dict[str, DeviceOption] = {}
    multiplexing: Multiplexing | None = None  # None: prompts and decodes are computed together
    state_ratio: float = 0.0  # bytes of recurrent layers' states for each byte of keys and values
    num_states: int | None = None  # number of states, which overrides state_ratio
    state_dtype: str = "float32"  # of recurrent states
    recurrent_backend: str = "cpu"  # kernels of recurrent layers, of DeviceFacts.recurrent_backends
    # tokens in the window pool for each token in the pool of full layers; 0: one pool serves all layers
    window_ratio: float = 0.0
    host_bytes: int = 0  # size of this rank's host tier; 0: host_ratio decides
    host_ratio: float = 0.0  # host pages for each device page, if host_bytes is 0; 0: no host tier
    # layout of host memory: a row of LAYOUTS in devices/host_memory.py
    host_layout: str = "layer_first"
    host_fds: list[int] = []  # file descriptors of the ranks' host memory; set when ranks are started
    state_fds: list[int] = []  # the same for states of recurrent layers
    ep_size: int = 1  # groups of ranks that whole experts are spread over
    expert_places: ExpertPlaces | None = None  # None: each expert has one place, in order, and stays there
    moe_a2a_backend: str = "none"  # exchange of tokens between experts
    deepep_mode: str = "auto"
    overlap: StepOverlap = StepOverlap()
    kv_dtype: str = "auto"  # dtype of the pages: bfloat16, fp8_e4m3, fp8_e5m2, int8; auto: as `dtype`
    grammar: GrammarSetup | None = None  # None: no grammars on these ranks
    processors: list[str] = []  # logits processors: package.module:Class
    config_overrides: JsonDict = {}  # --json-model-override-args
    has_wide_head: bool = False  # logits are computed in float32 for all dtypes
    # "whole": the model's encoder of images is loaded, if this runtime has it, and each rank encodes all
    # images; "shared": a share of them; "none": it is not loaded; "alone": nothing else is loaded;
    # "elsewhere": other servers encode, and what comes of them are rows
    encoding: Encoding = "whole"
    is_embedding: bool = False  # the model embeds instead of generating (models/config/tasks.py)
    pooling: str = "auto"  # how a model that does not generate pools hidden states (models/config/tasks.py)
    quantization: str | None = None  # what the checkpoint's shall be, or what it is quantized to
    # of an fp8 cache, by rank and layer, in place of the checkpoint's; (): the checkpoint's
    cache_scales: tuple[tuple[float, ...], ...] = ()
    model_impl: str = "auto"  # whose code computes the model (models/config/transformers_config.py)
    graph_sizes: list[int] = []  # numbers of sequences for which decode steps may be captured
    graph_pads: bool = True  # a graph may serve fewer sequences than it has rows
    # numbers of tokens for which steps with prompts may be captured as piecewise graphs
    piecewise_sizes: list[int] = []
    compiled: CompileConfig = CompileConfig()
    trace_folder: str = ""  # where traces of captures are written; empty: none are
    adapters: AdapterSetup | None = None  # None: no adapters on these ranks
    offload_setup: WeightOffload = WeightOffload()
    expert_steps: int | None = None  # steps that the record of expert counts holds; None: nothing is counted
    reports_experts: bool = False  # requests may ask which experts computed their tokens
    kept_weights: KeepWeights = KeepWeights()
    reading: Reading = Reading()
    weight_functions: tuple[str, ...] = ()  # --custom-weight-loader: package.module:function
    config_file: str | None = None  # read in place of config.json (--decrypted-config-file)
    log_level: str = "silent"  # the lowest level of log lines that ranks write, as log.level() names it
    log_format: str = "text"  # text or json
    speculation: Speculation | None = None  # None: no drafts but those that grammars force
    diagnosis: Diagnosis = NOTHING

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.tp_size * self.pp_size

    @property
    def reporter(self) -> int:
        """The rank that answers for all: the first one of the last stage."""
        return self.num_ranks - self.tp_size

    @property
    def samplers(self) -> range:
        """The ranks that sample and answer steps: the first one of each attention group of the last stage."""
        return range(self.reporter, self.num_ranks, self.attention_layout.group_size)

    @property
    def gathers_latents(self) -> bool:
        """Whether shards of tokens are gathered behind the projections to latents, which are computed of the
        shard. Parts of prompts are others than shards."""
        return self.scatters_inputs and self.attention_parts == 1

    @property
    def attention_layout(self) -> AttentionLayout:
        """How attention divides the ranks of a stage."""
        return AttentionLayout(self.tp_size, self.attention_groups, self.attention_parts)

    def stage_of(self, rank: int) -> Stage:
        """The stage that a rank is in."""
        has_heads = self.speculation is not None and self.speculation.has_heads
        return Stage(rank // self.tp_size, self.pp_size, has_heads)

    @property
    def ranks_on_node(self) -> int:
        """Ranks of this replica on each node."""
        return self.num_ranks // self.num_nodes

    @property
    def ranks_on_machine(self) -> int:
        """Ranks of all replicas on each node."""
        return self.ranks_on_node * self.num_replicas

    def index_on_node(self, rank: int) -> int:
        """Which of its node's ranks a rank is, from 0."""
        return rank % self.ranks_on_node


# what is captured: decode steps, verify steps, pieces of steps with prompts
CaptureUnit = Literal["sequences", "verifies", "tokens"]


class Capture(Struct, frozen=True, array_like=True, tag="capture"):
    """Capture decode steps or verify steps of `size` sequences, or pieces of steps of `size` tokens. Captured
    answers it."""

    size: int
    unit: CaptureUnit = "sequences"


class Profile(Struct, frozen=True, kw_only=True, array_like=True, tag="profile"):
    """Start a profile of the rank; without a folder: write the current one."""

    folder: str = ""
    activities: tuple[str, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False
    num_steps: int | None = None  # steps after which the profile is written; None: at the next Profile


class PrepareGrammar(Struct, frozen=True, array_like=True, tag="prepare_grammar"):
    """Compile a grammar, which a later Admit names, while steps run. GrammarPrepared answers it, from rank 0.
    None: load the grammar backend, because some request with a grammar is expected."""

    id: int
    grammar: Grammar | None


ExpertCountsAction = Literal["read", "start", "stop", "dump"]


class CountExperts(Struct, frozen=True, array_like=True, tag="count_experts"):
    """Read the expert counts since the ranks started, after an action on the record of single steps: `start`
    clears it and begins to record, `stop` ends recording, `dump` writes it to a file in `folder` and clears
    it, `read` does nothing. ExpertCounts answers it, from rank 0."""

    id: int
    action: ExpertCountsAction
    folder: str = ""


class StopRank(Struct, frozen=True, array_like=True, tag="stop"):
    """No more records follow; the rank ends with exit code 0."""


RankCommand = (
    StepPlan
    | GroupSteps
    | Encode
    | EncodeRows
    | AlignSound
    | Capture
    | Profile
    | PrepareGrammar
    | LoadAdapter
    | CountExperts
    | ReadExperts
    | MoveExperts
    | ChangeMemory
    | UpdateWeights
)
"""Commands between StartRank and StopRank."""

ToRank = StartRank | RankCommand | StopRank


class StandingBy(Struct, frozen=True, array_like=True, tag="standing_by"):
    """A rank that was started as a standby has imported what its device needs, and waits for StartRank."""

    rank: int


LoadPhase = Literal["process", "device", "weights", "packing", "compile", "profile", "pages", "ready"]
"""The phases of a rank's start, in their order. A rank reports those from "device" to "pages". The event loop
adds "process", in which the process starts and imports its libraries, and "ready"."""


class LoadProgress(Struct, frozen=True, array_like=True, tag="progress"):
    """Progress of a rank's start: the phase, and how much of it is done. Units: bytes of the checkpoint for
    weights, else a number of parts; a total of 0 is not known."""

    rank: int
    phase: LoadPhase
    done: int = 0
    total: int = 0


class RankReady(Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """The rank can take steps. It has measured the sizes."""

    rank: int
    num_pages: int  # pages of full layers, the padding page 0 included, which plans never use
    weights_bytes: int
    pages_bytes: int  # pages of all pools
    device_name: str
    phases_s: dict[str, float]  # seconds of each start-up phase
    # pages of sliding-window layers, padding page included; 0: they share the pages of the others
    num_window_pages: int = 0
    num_state_slots: int = 0  # state slots of recurrent layers, padding slot included; 0: there are none
    num_host_states: int = 0  # states in this rank's host memory, place 0 included, which plans never use
    num_host_pages: int = 0  # pages of this rank's host tier, all of them usable
    # bytes of each part of a host page (devices/host_memory.py)
    host_part_bytes: tuple[int, ...] = ()
    used_bytes: int = 0  # device memory that the rank has taken, as the device reports it


class RankFailed(Struct, frozen=True, array_like=True, tag="failed"):
    """The rank cannot start or continue. `is_start_error` marks a message for the user (exit code 2)."""

    rank: int
    message: str
    is_start_error: bool


class Captured(Struct, frozen=True, array_like=True, tag="captured"):
    """The result of a Capture on all ranks."""

    size: int
    seconds: float
    num_bytes: int  # device memory that it took
    error: str  # why it failed; empty: it succeeded
    unit: CaptureUnit = "sequences"
    is_fatal: bool = False  # a rank failed while others wait for it in a collective: all ranks end


class GrammarPrepared(Struct, frozen=True, array_like=True, tag="grammar_prepared"):
    """Rank 0 has compiled the grammar of a PrepareGrammar, or cannot: an Admit that names it waits no
    more."""

    id: int


class ExpertCounts(Struct, frozen=True, array_like=True, tag="expert_counts"):
    """Tokens that each expert computed since the ranks started."""

    id: int
    layers: tuple[int, ...]  # indices of the model's layers with experts
    counts: np.ndarray  # int64 [layers * experts]
    num_steps: int  # steps in the record, before a dump cleared it
    file: str = ""  # the file that a dump wrote
    error: str = ""  # why a dump wrote no file


FromRank = (
    StandingBy
    | LoadProgress
    | RankReady
    | RankFailed
    | Captured
    | AdapterLoaded
    | GrammarPrepared
    | ExpertCounts
    | ExpertsPlaced
    | MemoryReport
    | RowsEncoded
    | PartsSaved
    | StepResult
)
