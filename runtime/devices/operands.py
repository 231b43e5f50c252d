"""Operands of a device's functions other than plain tensors, and the fused functions that it may have.
Torch-free at run time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from runtime.devices.all_to_all import PackedExperts
from runtime.models.config.quantization_schemes import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.devices.base import AttentionPlan, Gate
    from runtime.devices.sampling_inputs import SamplingInputs


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized weight W [out, in], the same for all checkpoint formats. A stack of experts has one more
    dimension in front.

    Fp8, Int8: W = weight * scale. Codes: W = (weight - zeros) * scale. Each group of inputs has a column of
    scale and zeros: input i is in group i // scheme.group_size, or in group order[i]; with scheme.group_size
    0 there is one column.

    Quantized activations are round(x / s + input_offset), saturated to float8_e4m3 or int8, and the result is
    multiplied by s. s is `input_scale`, or for each token (and each group of inputs, for Fp8 with groups) the
    largest absolute value divided by 448 or 127. With Int8("tensor") s and offset are folded into the
    constants: y = (product of integers + sums) * scale.
    """

    scheme: Scheme
    # [out, in] float8_e4m3fn or int8; Codes: uint8 [out, in * bits / 8], input 2i in the lower half of byte i
    weight: "Tensor"
    scale: "Tensor"  # float32 [out, groups]
    zeros: "Tensor | None" = None  # uint8 [out, groups]; None: 2 ** (bits - 1)
    order: "Tensor | None" = None  # int32 [in]
    input_scale: "Tensor | None" = None  # float32 [1], if scheme.activations is "tensor"
    input_offset: "Tensor | None" = None  # float32 [1], if scheme.activations is "tensor"; Int8 only
    sums: "Tensor | None" = None  # int32 [out], Int8 only; a bias may be included


@dataclass(frozen=True, slots=True)
class Seen:
    """Tokens that S sequences have seen, and their penalties.

    The logits of all seen tokens are divided by the repetition penalty if they are positive, else multiplied;
    then the logits of generated tokens are lowered by frequency * count + presence.
    """

    generated: "Tensor"  # int32 [S, V]
    in_prompt: "Tensor"  # bool [S, V]
    penalties: "Tensor"  # float32 [S, 3]: frequency, presence, repetition


class SlotTensors(NamedTuple):
    """What a rank keeps of its S slots between steps, on the device."""

    page_tables: "Tensor"  # int32 [pools, S, pages]
    lengths: "Tensor"  # int64 [S]
    last_token: "Tensor"  # int64 [S]


class SlotParams(NamedTuple):
    """How the sequences of S slots are sampled."""

    floats: "Tensor"  # float32 [3, S]: temperature, top_p, min_p
    seeds: "Tensor"  # int64 [S]
    top_k: "Tensor"  # int64 [S]; 0: no limit
    vocab_size: int


class DecodeRows(NamedTuple):
    """N rows of a captured decode step; tensors int64 [N] on the device."""

    slots: "Tensor"
    positions: "Tensor"  # of the tokens that are computed
    token_ids: "Tensor"
    locations: "tuple[Tensor, ...]"  # for each pool, as ForwardBatch.locations
    # as of Graphs.plan_decodes; None: the device makes it there
    attention: "AttentionPlan | None" = None


class NormInputs(NamedTuple):
    """What FusedOps.add_rms_norm is given."""

    x: "Tensor"  # [T, D]
    residual: "Tensor"  # [T, D]
    weight: "Tensor"  # [D]
    eps: float


# weights in MXFP4 (layers/quantization/mxfp4.py): codes uint8 [E, out, in / 2], and exponents uint8 [E, out,
# in / 32]
CodedStack = tuple["Tensor", "Tensor"]


@runtime_checkable
class ClampedExperts(Protocol):
    """Experts of a device that may compute those of gpt-oss together: they have biases, and a gate whose
    halves are clamped (models/gpt_oss.py)."""

    def pack_clamped(
        self, gate_up: "Tensor", down: "Tensor", biases: "tuple[Tensor, Tensor]"
    ) -> PackedExperts | None:
        """Packs the weights [E, 2 * inner, hidden], gate above up, and [E, hidden, inner], and their biases
        [E, 2 * inner] and [E, hidden], for Experts.apply. None: the device does not compute them together."""
        ...

    @property
    def packs_mxfp4(self) -> bool:
        """Whether `pack_clamped_mxfp4` may be called."""
        ...

    def pack_clamped_mxfp4(
        self, gate_up: "CodedStack", down: "CodedStack", biases: "tuple[Tensor, Tensor]"
    ) -> PackedExperts:
        """As `pack_clamped`, of weights in MXFP4."""
        ...


class FusedOps(Protocol):
    """Functions that a device may compute in one kernel where others use several Ops. `sums_ranks`: whether
    `add_rms_norm_of_ranks` may give a result."""

    @property
    def sums_ranks(self) -> bool: ...

    def prepare_heads(
        self,
        qkv: "Tensor",
        norm: "tuple[Tensor, float] | None",
        cos: "Tensor",
        sin: "Tensor",
        k_cache: "Tensor",
        v_cache: "Tensor",
        locations: "Tensor",
    ) -> "Tensor":
        """Everything between projection and attention: qkv [T, (H + 2 K) * D] -> queries [T, H, D].

        Queries and keys go through rms_norm with `norm` (weight [H + K, D], whose rows are equal for all
        query heads, and for all key heads, and eps), then rotary. Keys and values go through store_kv.
        """
        ...

    def add_rms_norm_wide(
        self, x: "Tensor", residual: "Tensor", weight: "Tensor", eps: float
    ) -> "tuple[Tensor, Tensor | None, Tensor]":
        """(rms_norm(x + residual), the same as float32, x + residual); may overwrite `residual`. None in
        place of float32 where the device has no launch that gives both."""

    def add_rms_norm(
        self, x: "Tensor", residual: "Tensor", weight: "Tensor", eps: float, feeds: object
    ) -> "tuple[Tensor, Tensor]":
        """As Ops.add_rms_norm. `feeds`: the packed weight that Ops.linear gets next with the norm, for which
        the device may prepare it; None: it is not known."""
        ...

    def add_rms_norm_of_ranks(self, inputs: NormInputs, feeds: object) -> "tuple[Tensor, Tensor] | None":
        """`add_rms_norm` with the sum over all ranks of one stage in place of x, of which each has a part;
        None, on all of them: they sum it first."""
        ...

    def act_and_mul(self, x: "Tensor", kind: "Gate", feeds: object) -> "Tensor":
        """As Ops.act_and_mul of x [T, 2 * D]; `feeds`: as of `add_rms_norm`."""
        ...

    def quantized_norm(
        self, x: "Tensor", residual: "Tensor", weight: "Tensor", eps: float, feeds: object
    ) -> "tuple[Tensor, Tensor] | None":
        """The results of `add_rms_norm` where Ops.linear with the packed weight `feeds` alone reads the norm,
        which may therefore be the integers that this product takes. None: the device has no such launch."""
        ...

    def quantized_act(self, x: "Tensor", kind: "Gate", feeds: object) -> "Tensor | None":
        """The result of `act_and_mul` where Ops.linear with the packed weight `feeds` alone reads it, which
        may therefore be the integers that this product takes. None: the device has no such launch."""
        ...

    def gated_product(self, x: "Tensor", packed: object, kind: "Gate") -> "Tensor | None":
        """act_and_mul of the product of x [N, ins] with a packed weight that has no bias and no adapters;
        None: the device computes the two one after the other."""
        ...

    def gated_product_of_norm(
        self, inputs: NormInputs, packed: object, kind: "Gate"
    ) -> "tuple[Tensor, Tensor] | None":
        """(gated_product of the norm that add_rms_norm makes of `inputs`, x + residual), with the residual
        as it was; None: the device computes the two one after the other."""
        ...

    def router_logits_of_norm(
        self, inputs: NormInputs, packed: "Tensor"
    ) -> "tuple[Tensor, Tensor, Tensor] | None":
        """(router_logits of the norm that add_rms_norm makes of `inputs`, x + residual, the norm), with the
        residual as it was; None: as of `gated_product_of_norm`."""
        ...

    def pack_router(self, weight: "Tensor") -> "Tensor":
        """The weight [E, hidden] of a router, in the form that `router_logits` takes. The caller gives up the
        original."""
        ...

    def router_logits(self, x: "Tensor", packed: "Tensor") -> "Tensor":
        """x [T, hidden] -> float32 [T, E], the products' sums in float32."""
        ...

    def begin_decodes(self, packed: "Tensor", slots: SlotTensors, page_size: int) -> DecodeRows:
        """The beginning of a captured decode step. `packed`: int32 [1 + 3 * pools, N], the slots of N rows,
        and for each pool N updates of its page table: slots, rows and page ids."""
        ...

    def sampling_inputs(
        self, slots: "Tensor", lengths: "Tensor", params: SlotParams, filters: tuple[int, bool]
    ) -> "SamplingInputs":
        """How to sample for `slots`, int64 [N], the tokens at positions `lengths`, int64 [N]. `filters`: the
        largest top_k and whether a row has a top_p, of SamplingInputs."""
        ...

    def penalise(self, logits: "Tensor", rows: "Tensor", seen: Seen, at: "Tensor") -> None:
        """Applies penalties, in place, to `rows` (int64 [M], distinct) of float32 logits [N, V]: those of the
        rows `at` (int64 [M]) of `seen`."""
        ...


class TokenMasks(NamedTuple):
    """The tokens that may be chosen in some rows of logits [N, V]."""

    rows: "Tensor"  # int64 [M], distinct
    bits: "Tensor"  # int32 [M, ceil(V / 32)]: token i is bit i % 32 of word i / 32


class LogitsOps(Protocol):
    """From rows of logits to tokens and log probabilities. Where `needs_finite` is False logits may be
    anything, and count as what `clean` (layers/sampling/sampler.py) makes of them; else they are finite.
    `takes_masks`: `choose` reads masks itself; it may overwrite logits that they ban."""

    needs_finite: bool
    takes_masks: bool

    def choose(
        self, logits: "Tensor", inputs: "SamplingInputs | None", masks: TokenMasks | None = None
    ) -> "Tensor":
        """A token id, int64 [N], for each row of float32 logits [N, V]. `inputs` None: the first of the
        largest logits. `masks`, where they are taken: the tokens are those that Ops.mask before would
        give."""
        ...

    def logprobs(self, logits: "Tensor", targets: "Tensor", width: int) -> "tuple[Tensor, Tensor, Tensor]":
        """Log probabilities of `targets` (int64 [N]), float32 [N], and the `width` likeliest tokens of each
        row of logits [N, V], the likeliest first: int32 [N, width], and theirs, float32 [N, width]."""
        ...
