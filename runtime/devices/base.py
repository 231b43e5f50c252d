"""What a device is: a folder of this package that provides an Executor, and, for torch devices, small
protocols.

    Executor      what the rank's main loop drives: start, launch, close                  (every device)
    Ops           the arithmetic that differs from device to device                       (torch devices)
    Experts       choosing experts, and their grouped matrix products                     (torch devices)
    Memory        how much there is, how pages are laid out, and copies to host memory    (torch devices)
    Collectives   sums and gathers across the ranks of one model                          (torch devices)
    Exchange      tokens to the ranks of their experts, and back (exchange.py)            (torch devices)
    Graphs        capture and replay of a step's kernels, where the device has them       (torch devices)

A torch device fills in a `Device` and hands it to `runner.TorchExecutor`, which is the Executor of all of
them. Shapes below: `T` tokens of a step, `R` rows, `H` query heads and `K` key/value heads of this rank, `D`
head size, `V` vocabulary.

This file imports no torch at run time: the null device is one too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from runtime.devices.all_to_all import Exchanges
from runtime.devices.attention_scores import Scores
from runtime.devices.facts import ANY_K, DeviceFacts
from runtime.devices.host_memory import HostPages
from runtime.devices.lora import AdapterOps
from runtime.devices.operands import Fused, Quantized
from runtime.devices.page_copies import Arrivals, Copies
from runtime.messages.steps import StepPlan
from runtime.models.moe_config import Routing

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

Gate = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as the layers see it: the tokens of all rows in one line, decode rows first."""

    token_ids: "Tensor"  # int64 [T]
    positions: "Tensor"  # int64 [T]
    # of each pool, int64 [T]: where the token's key and value go: page id * page_size + offset
    locations: "tuple[Tensor, ...]"
    # of each layer, keys and values, or latents and rotary parts: [pages of its pool * page_size, K, D]
    kv: "list[tuple[Tensor, Tensor]]"
    attention: Any  # what Ops.plan_attention made of the step
    types: "Tensor | None" = None  # int64 [T]: of each token's segment, for encoders
    arrivals: Arrivals | None = None  # of pages that this step loads from host memory
    # int64 [E] and float32 [E, hidden]: tokens that are embedded as these
    embeds: "tuple[Tensor, Tensor] | None" = None
    is_decode: bool = False  # every row decodes
    is_real: "Tensor | None" = None  # bool [T]: tokens that are somebody's; None: all
    is_compiled: bool = False  # by what the model has compiled (ranks/compile.py)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How to choose a token from each of `N` rows of logits; tensors [N] on the device."""

    temperature: "Tensor"  # float32; 0: the largest logit
    top_p: "Tensor"  # float32
    top_k: "Tensor"  # int64; 0: all
    min_p: "Tensor"  # float32
    uniform: "Tensor"  # float64 in [0, 1): the row's random number
    largest_k: int = ANY_K  # of the rows' top_k, as the host knows them; so many at most, 0: no row has one
    has_top_p: bool = True  # False: no row has one


class Ops(Protocol):
    """Arithmetic. Functions return fresh tensors unless they say otherwise and keep the dtype of their first
    argument."""

    def plan_attention(
        self, plan: StepPlan, page_tables: "Tensor", page_size: int, windows: tuple[int, ...]
    ) -> Any:
        """Once a step. `page_tables`: int32 [pools, max_slots, pages], the first of layers that see
        everything, the last of those with a window, whose rows before it may hold anything; `windows`: the
        layers' sliding windows, 0 for none."""
        ...

    def attention(
        self, q: "Tensor", k_cache: "Tensor", v_cache: "Tensor", plan: Any, scores: Scores
    ) -> "Tensor":
        """Causal attention of q [T, H, D] over the pages, where the step's own keys already are, -> [T, H,
        D]."""
        ...

    def pack_latent(self, up: "Tensor", nope_dim: int) -> Any:
        """What makes keys (first `nope_dim`, N) and values (the other V) of each head from a latent, [H, N +
        V, R], in the form that `latent_attention` likes best; the caller gives the original up."""
        ...

    def latent_attention(
        self,
        q: "Tensor",
        q_rope: "Tensor",
        latents: "Tensor",
        ropes: "Tensor",
        up: Any,
        plan: Any,
        scale: float,
    ) -> "Tensor":
        """Causal multi-head latent attention (DeepSeek-V2, 2024) over the pages, where the step's own latents
        already are.

        A head's key is its part made from the latent [N], then the rotary part [P] that all heads share; its
        value is made from the latent [V]. q [T, H, N], q_rope [T, H, P], caches [num_pages * page_size, 1, R]
        and [..., 1, P] -> [T, H, V]. Whether keys and values are made, or queries brought to the latents, is
        the device's choice, row by row.
        """
        ...

    def store_kv(
        self, k: "Tensor", v: "Tensor", k_cache: "Tensor", v_cache: "Tensor", locations: "Tensor"
    ) -> None:
        """Writes k, v [T, K, D] to their places in the caches [num_pages * page_size, K, D]; D of keys and of
        values may differ."""
        ...

    def rms_norm(self, x: "Tensor", weight: "Tensor", eps: float) -> "Tensor":
        """x / sqrt(mean(x²) + eps) * weight, the mean over the last dimension (Zhang and Sennrich, 2019).

        `weight` has that dimension, or the last two of `x`: a row for each head.
        """
        ...

    def add_rms_norm(
        self, x: "Tensor", residual: "Tensor", weight: "Tensor", eps: float
    ) -> "tuple[Tensor, Tensor]":
        """(rms_norm(x + residual), x + residual); may overwrite `residual`."""
        ...

    def rotary_tables(self, cos: "Tensor", sin: "Tensor") -> "tuple[Tensor, Tensor]":
        """Once a step: cosines and sines of a token's angles, float32 [T, D / 2], in the form that `rotary`
        likes best."""
        ...

    def rotary(self, x: "Tensor", cos: "Tensor", sin: "Tensor") -> "Tensor":
        """Turns x [T, heads, D] by the tables; the second half of D pairs with the first (Su et al.,
        2021)."""
        ...

    def act_and_mul(self, x: "Tensor", kind: Gate) -> "Tensor":
        """act(first half of the last dimension) * second half; gelu by its approximation with tanh (Hendrycks
        and Gimpel, 2016)."""
        ...

    def pack_linear(self, weight: "Tensor") -> Any:
        """A weight [out, in] in the form that `linear` likes best; the caller gives the original up."""
        ...

    def pack_quantized(self, weight: Quantized) -> Any:
        """The same for a weight of one of the device's schemes (DeviceFacts.schemes). Raises ModelError for a shape
        that its kernels lack."""
        ...

    def linear(self, x: "Tensor", packed: Any, bias: "Tensor | None") -> "Tensor":
        """x [N, in] -> [N, out]; `packed` is of either kind. A row does not depend on those beside it."""
        ...

    def sample(self, logits: "Tensor", draw: SamplingInputs) -> "Tensor":
        """A token id, int64 [N], for each row of float32 logits [N, V]; a pure function of the row and its
        Draw."""
        ...

    def mask(self, logits: "Tensor", rows: "Tensor", bits: "Tensor") -> None:
        """Bans, in place, in each of the rows (int64 [M], rising) of finite float32 logits [N, V] the tokens
        whose bit is 0 in its row of int32 `bits` [M, ceil(V / 32)], token i being bit i % 32 of word i // 32:
        they become BANNED of layers/sampling/sampler.py."""
        ...


class Experts(Protocol):
    """Mixtures of experts."""

    def route(self, logits: "Tensor", bias: "Tensor | None", routing: Routing) -> "tuple[Tensor, Tensor]":
        """Chooses `top_k` experts for each token: float32 logits [T, E] -> ids int64 [T, k] and weights
        float32 [T, k].

        Scores are softmax or sigmoid of the logits. The chosen have the largest scores, after adding `bias`
        [E], among the `top_groups` groups of experts (equal parts of E, in order) with the largest such
        score, or sum of two. Weights are the scores without bias.
        """
        ...

    def pack(self, gate_up: "Tensor", down: "Tensor") -> Any:
        """Weights [E, 2 * inner, hidden] and [E, hidden, inner] of this rank's experts in the form that
        `apply` likes best; the caller gives the originals up."""
        ...

    def pack_quantized(self, gate_up: Quantized, down: Quantized) -> Any:
        """The same for stacks of weights in few bits."""
        ...

    def apply(self, x: "Tensor", expert_ids: "Tensor", weights: "Tensor", packed: Any) -> "Tensor":
        """x [T, hidden] -> for each token the sum over its `expert_ids` [T, k] of weight * down(silu(gate(x))
        * up(x)).

        Ids outside 0 .. E - 1 are experts of other ranks and add nothing.
        """
        ...


class Memory(Protocol):
    """How much there is for this rank, and where pages come from."""

    def free_bytes(self) -> int:
        """Bytes that this rank may still take; ranks that share one memory get equal parts."""
        ...

    def taken_bytes(self) -> int:
        """Bytes that this rank has taken, free ones that wait in its allocators included."""
        ...

    def expect_weights(self) -> None:
        """Called before weights are loaded: what takes their place later must be able to go."""
        ...

    def settle(self) -> None:
        """Called when the weights are in place, or gone: gives back whatever nobody holds."""
        ...

    def peak(self, run: Callable[[], None]) -> int:
        """Bytes that `run` takes at its most beside what is held; 0, and it was not run, where that cannot be
        measured."""
        ...

    def allocate_cache(
        self, num_tokens: int, num_heads: int, head_dim: int, dtype: "torch.dtype"
    ) -> "Tensor":
        """Zeros [num_tokens, num_heads, head_dim], committed when they are first written where the device
        can."""
        ...

    def free_host_bytes(self, cache_bytes: int) -> int:
        """Bytes of the machine's memory that this rank's host pages may take, beside a cache of `cache_bytes`
        that is not written yet."""
        ...

    def open_copies(self, kv: "list[tuple[Tensor, Tensor]]", host: HostPages, page_size: int) -> Copies:
        """Between the layers' keys and values and host memory, whose parts are theirs in order."""
        ...


class Collectives(Protocol):
    """Exchange between the `size` ranks of one model. All ranks call the same method in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """The sum over ranks; may overwrite `x`."""
        ...

    def all_gather(self, x: "Tensor", dim: int) -> "Tensor":
        """The ranks' equally shaped tensors joined along `dim` in rank order."""
        ...

    def reduce_scatter(self, x: "Tensor") -> "Tensor":
        """This rank's part, of `size` equal ones along dimension 0, of the sum over ranks."""
        ...

    def all_to_all(
        self, x: "Tensor", sent: list[int] | None = None, came: list[int] | None = None
    ) -> "Tensor":
        """Part i of dimension 0, of `size` equal ones, goes to rank i; returns what came, in rank order.

        Or unequal ones: `sent` rows go to each rank and `came` rows come from each, all of which may be none.
        """
        ...

    def broadcast(self, x: "Tensor") -> "Tensor":
        """Rank 0's `x` on every rank; overwrites `x` elsewhere."""
        ...

    def outcomes(self, mine: str) -> list[str]:
        """What each rank says came of what they did: "", or an error; told beside the exchanges (meeting.py).
        Raises Stranded."""
        ...

    def close(self) -> None: ...


class Graphs(Protocol):
    """Capture and replay of what a function launches, on devices that can. ranks/decode_graphs.py says what
    is captured.

    All graphs of a rank share one pool of memory: they are replayed one after the other, in the order of the
    device's other work, and what outlives a replay is in tensors from outside. A tensor that a body makes
    lives at the same place in each replay.
    """

    def plan_decodes(
        self,
        slots: "Tensor",
        lengths: "Tensor",
        page_tables: "Tensor",
        page_size: int,
        windows: tuple[int, ...],
    ) -> Any:
        """As Ops.plan_attention, for decode rows whose slots and lengths (the step's token included) are on
        the device, int64 [R]. Called in captured bodies: it may read their values on the device alone, and
        must hold for any lengths that come later."""
        ...

    def capture(self, body: Callable[[], None]) -> Any:
        """The graph of what `body` launches; it has run once before, and may run or not run now: it then
        computes rows of padding.

        Raises RuntimeError when it cannot be captured or there is no memory for it; the device must go on as
        if nothing had been tried.
        """
        ...

    def forget(self) -> None:
        """All graphs are gone: what they shared goes as well, and the next capture begins anew."""
        ...

    def replay(self, graph: Any, lengths: "np.ndarray | tuple[()]") -> None:
        """Launches it again. `lengths`, int32 [size]: of each row with this step's token, 1 for padding, for
        operators that take them from the host; empty where the graph attends to nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """A torch device that is open on this rank: facts and the protocols above."""

    facts: DeviceFacts
    torch_device: "torch.device"
    ops: Ops
    experts: Experts
    memory: Memory
    collectives: Collectives
    graphs: Graphs | None
    ep_size: int = 1  # groups of ranks that whole experts are spread over; divides the number of ranks
    exchanges: Exchanges | None = None  # of tokens between experts; None: all ranks have all tokens
    adapters: AdapterOps | None = None  # None: in plain torch (layers/lora.py)
    fused: Fused | None = None  # None: as several Ops (layers/fused_ops.py)
    # torch's module of the device, with Stream, Event, stream, current_stream; None: a call is done when it
    # returns
    streams: Any = None
    # with open(PlainProlog) -> Prolog, of latent attention; None: in plain steps
    # (layers/attention/mla_prolog.py)
    prologs: Any = None
    beside: Any = None  # a second stream, for shared experts beside routed ones (layers/side_stream.py)
    # with exchanges: tokens are joined behind the first projections of latent attention, and not before
    joins_latents: bool = False
    # of layers whose weights are made elsewhere (hosted.py)
    homes: "Mapping[int, torch.device]" = field(default_factory=dict)

    def of_layer(self, index: int) -> "Device":
        """What a layer of the model is made with."""
        return replace(self, torch_device=self.homes[index]) if index in self.homes else self
