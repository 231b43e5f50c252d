"""What a torch device is: a `Device`, made of facts and of the protocols below. Torch-free at run time.

    Ops           arithmetic that differs between devices
    Experts       routing of tokens to experts, and their grouped matrix products
    Memory        how much there is, how pages are allocated, and copies to host memory
    Collectives   sums and gathers across the ranks of one model, or of one stage of its pipeline
    StageLinks    hidden states and tokens between stages (stages.py)
    MoeAllToAll   tokens to the ranks of their experts and back (all_to_all.py)
    Graphs        capture and replay of a step's kernels, where the device has them

A folder of this package is a device. Its device.py offers `FACTS` and `open_device`, and
ranks/torch_executor.py computes the steps of all torch devices. The cpu device is the specification of these
protocols: the conformance tests in tests/devices compare the others with it.

Shapes: `T` tokens of a step, `R` rows, `H` query heads and `K` key/value heads of this rank, `D` head size,
`V` vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from runtime.devices.all_to_all import AllToAllModes
from runtime.devices.attention_ranks import AttentionRanks
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cross_batch import CrossBatch
from runtime.devices.decoder_spec import ForwardPrograms
from runtime.devices.experts import Experts
from runtime.devices.facts import DeviceFacts
from runtime.devices.host_memory import HostPages
from runtime.devices.kernel_compiler import KernelCompiler
from runtime.devices.lora import LoraOps
from runtime.devices.mla_prologs import MlaPrologs
from runtime.devices.operands import FusedOps, LogitsOps, Quantized
from runtime.devices.packed import GgmlWeights, KeptWeights, PackedLatent, PackedWeight, RowQuantizer
from runtime.devices.page_copies import PageCopier, PageLoads, PageSaves
from runtime.devices.partitions import Partitions
from runtime.devices.profiles import RecordProfile
from runtime.devices.recurrent import RecurrentKernels, StateSteps
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.devices.sparse_latents import SparseLatentOps
from runtime.devices.stages import StageLinks
from runtime.devices.state_rows import StateRows
from runtime.devices.step_graphs import Graphs
from runtime.devices.streams import Streams
from runtime.messages.experts import ExpertPlaces
from runtime.messages.prompt_split import PromptSplit
from runtime.messages.ranks import StepOverlap
from runtime.messages.stages import Stage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runtime.layers.parallel.context_parallel import TokenPart
    from runtime.layers.side_stream import SideStream
    from runtime.models.config.model_config import ModelConfig

Gate = Literal["silu", "gelu_tanh"]


class AttentionPlan(Protocol):
    """What a device prepares once a step for its attention kernels. Only the device looks inside."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step as the layers see it: the tokens of all rows in one line, decode rows first."""

    token_ids: "Tensor"  # int64 [T]
    # int64 [T], what rotary positions are of; or [T, 3] where tokens stand in grids (layers/rotary.py)
    positions: "Tensor"
    # for each pool int64 [T], where the token's key and value are stored: page id * page_size + offset
    locations: "tuple[Tensor, ...]"
    # for each layer keys and values, or latents and rotary parts: [pages of its pool * page_size, K, D]
    kv: "list[tuple[Tensor, ...]]"
    attention: AttentionPlan | None  # of Ops.plan_attention; None: the layers have no attention to plan
    types: "Tensor | None" = None  # int64 [T], the segment of each token, for encoders
    page_loads: PageLoads | None = None  # pages that this step loads from host memory
    # int64 [E] and [E, hidden]: indices of tokens that are given as embeddings, and these; with n times
    # hidden numbers more in a row, what is added behind each of the first n layers (DeepStack)
    embeds: "tuple[Tensor, Tensor] | None" = None
    is_decode: bool = False  # every row decodes
    is_real: "Tensor | None" = None  # bool, False for padding, of what experts get; None: there is none
    group_tokens: tuple[int, ...] = ()  # T of each attention group; (): there is one
    states: StateRows | None = None  # None: the model has no recurrent layers
    # the tokens that `attention` is of; None: all, and this rank computes the queries of all of them
    part: "TokenPart | None" = None
    # the first tokens and the others, which are computed in turns (ranks/two_batches.py), or at the same time
    # (ranks/side_by_side.py); None: all are one
    micro_batches: "tuple[ForwardBatch, ForwardBatch] | None" = None
    cross: CrossBatch | None = None  # None: the model attends to no sounds
    page_saves: PageSaves | None = None  # pages that this step computes, and saves layer by layer


class Ops(Protocol):
    """Arithmetic. Functions return fresh tensors unless they say otherwise, and keep the dtype of their first
    argument."""

    packs_rows: bool  # `pack_linear` returns PackedRows

    def plan_attention(
        self, plan: AttentionRows, page_tables: "Tensor", page_size: int, windows: tuple[int, ...]
    ) -> AttentionPlan:
        """Prepares the attention of one step.

        `page_tables`: int32 [pools, max_slots, pages]. The first pool is that of layers with full attention,
        the last one that of layers with a window, whose rows before the window are undefined. `windows`: the
        sliding windows of the layers, 0 for full attention.
        """
        ...

    def attention(
        self, q: "Tensor", k_cache: "Tensor", v_cache: "Tensor", plan: AttentionPlan, scores: Scores
    ) -> "Tensor":
        """Causal attention of q [T, H, D] over the pages, which hold the step's own keys already, -> [T, H,
        D]."""
        ...

    def pack_latent(self, up: "Tensor", nope_dim: int) -> PackedLatent:
        """Packs the up-projection [H, N + V, R], which makes each head's key (the first `nope_dim` = N rows)
        and value (the other V) from a latent. The caller gives up the original."""
        ...

    def latent_attention(
        self,
        q: "Tensor",
        q_rope: "Tensor",
        latents: "Tensor",
        ropes: "Tensor",
        up: PackedLatent,
        plan: AttentionPlan,
        scale: float,
    ) -> "Tensor":
        """Causal multi-head latent attention (DeepSeek-V2, 2024) over the pages, which hold the step's own
        latents already.

        A head's key is made from the latent [N], followed by the rotary part [P] that all heads share; its
        value is made from the latent [V]. q [T, H, N], q_rope [T, H, P], caches [num_pages * page_size, 1, R]
        and [..., 1, P] -> [T, H, V]. The device decides for each row whether to expand latents to keys and
        values, or to absorb the up-projection into queries.
        """
        ...

    def store_kv(
        self, k: "Tensor", v: "Tensor", k_cache: "Tensor", v_cache: "Tensor", locations: "Tensor"
    ) -> None:
        """Writes k, v [T, K, D] at `locations` of the caches [num_pages * page_size, K, D]; both have a D."""
        ...

    def rms_norm(self, x: "Tensor", weight: "Tensor", eps: float) -> "Tensor":
        """x / sqrt(mean(x²) + eps) * weight, the mean over the last dimension (Zhang and Sennrich, 2019).

        `weight` has the last dimension of `x`, or its last two: a row for each head.
        """
        ...

    def add_rms_norm(
        self, x: "Tensor", residual: "Tensor", weight: "Tensor", eps: float
    ) -> "tuple[Tensor, Tensor]":
        """(rms_norm(x + residual), x + residual); may overwrite `residual`."""
        ...

    def rotary_tables(self, cos: "Tensor", sin: "Tensor") -> "tuple[Tensor, Tensor]":
        """Cosines and sines of the tokens' angles, float32 [T, D / 2], in the form that `rotary` reads.
        Called once a step."""
        ...

    def rotary(self, x: "Tensor", cos: "Tensor", sin: "Tensor") -> "Tensor":
        """Rotates x [T, heads, D] by the tables; the second half of D pairs with the first (Su et al.,
        2021)."""
        ...

    def act_and_mul(self, x: "Tensor", kind: Gate) -> "Tensor":
        """act(first half of the last dimension) * second half. gelu is approximated with tanh (Hendrycks and
        Gimpel, 2016)."""
        ...

    def pack_linear(self, weight: "Tensor") -> PackedWeight:
        """Packs a weight [out, in]. The caller gives up the original."""
        ...

    def pack_quantized(self, weight: Quantized) -> PackedWeight:
        """Packs a weight of one of the device's schemes (DeviceFacts.schemes). Raises ModelError for a shape
        that its kernels lack."""
        ...

    def linear(self, x: "Tensor", packed: PackedWeight, bias: "Tensor | None") -> "Tensor":
        """x [N, in] -> [N, out]. A row's result does not depend on the other rows."""
        ...

    def sample(self, logits: "Tensor", inputs: SamplingInputs) -> "Tensor":
        """A token id, int64 [N], for each row of float32 logits [N, V]. The result is a pure function of the
        row and its inputs."""
        ...

    def mask(self, logits: "Tensor", rows: "Tensor", bits: "Tensor") -> None:
        """Sets to BANNED (layers/sampling/sampler.py), in place, the logits of tokens that a row's bit mask
        excludes.

        `rows` int64 [M], rising, of float32 logits [N, V], which are finite where LogitsOps need them so;
        `bits` int32 [M, ceil(V / 32)], where token i is bit i % 32 of word i // 32 and 0 excludes it.
        """
        ...


class Memory(Protocol):
    """Memory of one rank: how much there is, and where pages come from."""

    def free_bytes(self) -> int:
        """Bytes that this rank may still allocate; ranks that share one memory get equal parts."""
        ...

    def used_bytes(self) -> int:
        """Bytes that this rank has taken from the device, free ones in its allocators included."""
        ...

    def prepare_loading(self) -> None:
        """Called before weights are loaded: memory of tensors that packing replaces must be reusable."""
        ...

    def empty_cache(self) -> None:
        """Called when weights have been loaded or dropped: returns unused memory of the allocators to the
        device."""
        ...

    def measure_peak(self, run: Callable[[], None]) -> int:
        """Bytes that `run` allocates at its peak, in addition to what is allocated before; 0, and it is not
        run, on devices that cannot measure it."""
        ...

    def allocate_cache(
        self, num_tokens: int, num_heads: int, head_dim: int, dtype: "torch.dtype"
    ) -> "Tensor":
        """Zeros [num_tokens, num_heads, head_dim]; memory is committed when it is first written where the
        device can do that. Raises StartError for a shape that the device's attention cannot read."""
        ...

    def allocate_states(self, num_states: int, shape: tuple[int, ...], dtype: "torch.dtype") -> "Tensor":
        """Zeros [num_states, *shape] for a recurrent layer, with memory as of `allocate_cache`."""
        ...

    def free_host_bytes(self, cache_bytes: int) -> int:
        """Bytes of host memory that this rank's pages may take beside an unwritten cache of `cache_bytes`."""
        ...

    def open_page_copier(self, kv: "list[tuple[Tensor, ...]]", host: HostPages, page_size: int) -> PageCopier:
        """Copies between layers' caches and the parts of host pages, in the same order. Raises StartError."""
        ...


class Collectives(Protocol):
    """Exchange between the `size` ranks of one model, or of one stage. All call the same method in the same
    order."""

    rank: int
    size: int
    # called while each collective is under way, for what does not need its result; None: nothing is
    meanwhile: "Callable[[], None] | None"

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """The sum over ranks; may overwrite `x`."""
        ...

    def all_gather(self, x: "Tensor", dim: int) -> "Tensor":
        """The ranks' equally shaped tensors joined along `dim` in rank order."""
        ...

    def reduce_scatter(self, x: "Tensor") -> "Tensor":
        """This rank's part, of `size` equal ones along dimension 0, of the sum; may overwrite `x`."""
        ...

    def all_to_all(
        self, x: "Tensor", sent: list[int] | None = None, received: list[int] | None = None
    ) -> "Tensor":
        """Sends part i of dimension 0, of `size` equal ones, to rank i; returns the parts received, in rank
        order. With `sent` and `received` these are the numbers of rows for and from each rank, 0 allowed."""
        ...

    def broadcast(self, x: "Tensor") -> "Tensor":
        """Rank 0's `x` on every rank; overwrites `x` elsewhere."""
        ...

    def outcomes(self, mine: str) -> list[str]:
        """The outcome that each rank reports, "" or an error, without a collective (rendezvous.py). Raises
        Stranded."""
        ...

    def close(self) -> None:
        """Ends the exchange; the ranks do not wait for each other."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device that is open on this rank."""

    facts: DeviceFacts
    torch_device: "torch.device"
    ops: Ops
    experts: Experts
    memory: Memory
    collectives: Collectives
    graphs: Graphs | None
    _: KW_ONLY
    ep_size: int = 1  # groups of ranks that whole experts are spread over; divides the number of ranks
    # exchange of tokens between experts; None: all ranks have all tokens
    all_to_all: AllToAllModes | None = None
    # attention in towers of images and sounds: queries, keys and values [..., heads, L, D] -> [..., heads, L,
    # D]; None: that of torch
    tower_attention: "Callable[[Tensor, Tensor, Tensor], Tensor] | None" = None
    lora_ops: LoraOps | None = None  # kernels for adapters; None: plain torch (layers/lora.py)
    fused: FusedOps | None = None  # None: several Ops in their place (layers/fused_ops.py)
    logits_ops: LogitsOps | None = None  # None: Ops and torch (layers/sampling/logits_ops.py)
    streams: Streams | None = None  # None: a call has been computed when it returns
    partitions: Partitions | None = None  # for decodes and prompts of one step; None: all do the same work
    mla_prologs: MlaPrologs | None = None  # None: plain Ops
    joins_latents: bool = False  # a token's latent and rotary part are one row of a page (MLA)
    sparse_latents: SparseLatentOps | None = None  # None: torch, with DeviceFacts.gathers_rows
    programs: ForwardPrograms | None = None  # None: layers are computed one by one
    # takes the caches of all layers once they are allocated; None: nothing depends on the number of pages
    take_pages: "Callable[[Sequence[tuple[Tensor, ...]]], None] | None" = None
    compiler: KernelCompiler | None = None  # None: no kernel is compiled at its first launch
    kept_weights: KeptWeights | None = None  # None: weights are packed at every start
    ggml: GgmlWeights | None = None  # None: the types of GGUF files are dequantized while they are loaded
    row_quantizer: RowQuantizer | None = None  # None: torch quantizes weights while they are loaded
    recurrent: RecurrentKernels | None = None  # None: torch computes recurrent layers (layers/recurrent/)
    record_profile: RecordProfile | None = None  # None: torch.profiler records (ranks/profiler.py)
    state_steps: StateSteps | None = None  # None: torch moves the states of decode rows on
    stage: Stage = Stage()  # of the pipeline, that this rank is in
    links: StageLinks | None = None  # to the other stages; None: there is one stage
    attention: AttentionRanks | None = None  # None: all ranks share the heads of all tokens
    prompt_split: PromptSplit | None = None  # of prompts between the parts of `attention`; None: there is one
    side_stream: "SideStream | None" = None  # computes shared experts while the main one computes others
    # each rank has a shard of the tokens between attentions, as with all_to_all
    scatters_inputs: bool = False
    # then: tokens are gathered behind the first projections of latent attention, and not before
    gathers_after_q: bool = False
    expert_places: ExpertPlaces | None = None  # None: each expert has one place, and stays there
    replicates_dense: bool = False  # dense layers of a model with experts are whole on each rank
    overlap: StepOverlap = StepOverlap()  # what is computed while collectives are under way
    # the device of a draft model's layers; raises StartError where they do not go with the target's. None: it
    # is this one
    for_drafts: "Callable[[Device, ModelConfig], Device] | None" = None
    layer: int = 0  # index of the layer whose weights are made (of_layer)
    # devices of layers whose weights are made elsewhere, by index (ranks/weight_offload.py)
    layer_devices: "Mapping[int, torch.device]" = field(default_factory=dict)

    @property
    def head_ranks(self) -> Collectives:
        """The ranks that share the attention heads of the same tokens."""
        return self.collectives if self.attention is None else self.attention.heads

    @property
    def scatters_tokens(self) -> bool:
        """Whether each rank has a shard of the step's tokens between attentions."""
        return self.all_to_all is not None or self.scatters_inputs

    @property
    def has_groups(self) -> bool:
        """Whether groups of ranks have requests, and so tokens, of their own."""
        return self.attention is not None and self.attention.layout.num_groups > 1

    @property
    def group_ranks(self) -> Collectives:
        """The ranks that have the same requests, and so the same rows of a step."""
        return self.collectives if self.attention is None else self.attention.group

    def of_group(self) -> "Device":
        """The device for layers that only the ranks with the same requests share."""
        return self if self.attention is None else replace(self, collectives=self.group_ranks)

    def of_layer(self, index: int) -> "Device":
        """The device on which the weights of a layer are made."""
        if index not in self.layer_devices and self.expert_places is None:
            return self
        torch_device = self.layer_devices.get(index, self.torch_device)
        return replace(self, torch_device=torch_device, layer=index)
