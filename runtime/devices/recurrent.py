"""Kernels for recurrent layers. Torch-free at run time. Without them torch computes (layers/recurrent/),
which is their definition."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from runtime.devices.state_rows import StateRows, StateTensors

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A recurrent layer between its projections, as this rank has it: a causal convolution of `C` channels,
    silu, a recurrence, and a gated norm.

    The channels are queries [key_heads * key_dim], keys and values [value_heads * value_dim] of the gated
    delta rule; inputs of the heads, keys and queries (B and C) of the scan of Mamba 2, whose key heads are
    its groups and whose key_dim is the size of a state; anything of a convolution alone, without silu.
    """

    kind: Literal["delta", "scan", "conv"]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_weight: "Tensor"  # [C, 1, K]
    conv_bias: "Tensor | None" = None  # [C]
    step_bias: "Tensor | None" = None  # float32 [value_heads], as the next two; none where `kind` is conv
    log_decay: "Tensor | None" = None
    skip: "Tensor | None" = None  # D of the scan
    step_limits: tuple[float, float] = (0.0, float("inf"))
    # norm of the gated output, of the output before its gate, none (a gate alone), or neither norm nor gate
    norm: Literal["gated", "before_gate", "none", "nothing"] = "nothing"
    norm_weight: "Tensor | None" = None  # [numbers], repeated over the output
    norm_size: int = 1  # numbers of a group, which have one mean
    eps: float = 1e-6


class RecurrentKernel(Protocol):
    """One layer. The states of a step's sequences move on, but for those of rows of drafts (StateRows)."""

    def forward(
        self,
        mixed: "Tensor",
        gate: "Tensor | None",
        rate: "Tensor | None",
        step: "Tensor | None",
        states: StateTensors,
        rows: StateRows,
    ) -> "Tensor":
        """mixed [T, C], gate [T, value_heads * value_dim], rate (of the delta rule) and step [T, value_heads]
        -> [T, value_heads * value_dim] in the dtype of `mixed`, or [T, C] of a convolution alone."""
        ...


class RecurrentKernels(Protocol):
    """Kernels of a device."""

    def open(self, spec: RecurrentSpec) -> RecurrentKernel | None:
        """The kernel of a layer whose weights are loaded; None: there is none for such a layer."""
        ...


class StateSteps(Protocol):
    """One token of each of R sequences: their states, found in place by `slots` (int64 [R]), move on. The
    other tensors are float32; `state` may be of a 16-bit type."""

    def scan(self, a: "Tensor", inputs: "tuple[Tensor, ...]", state: "Tensor", slots: "Tensor") -> "Tensor":
        """a [H], x [R, H, P], step [R, H], b and c [R, G, N], state [slots, H, P, N] -> y [R, H, P]; see
        layers/recurrent/mamba2.py."""
        ...

    def delta(self, inputs: "tuple[Tensor, ...]", state: "Tensor", slots: "Tensor") -> "Tensor":
        """q and k [R, H, K], v [R, H, V], g [R, H, 1 or K], rate [R, H], state [slots, H, K, V] ->
        [R, H, V]; see layers/recurrent/delta_rule.py."""
        ...
