"""Recurrent layers by the kernels (kernels/recurrent_call.h)."""

import ctypes
import weakref

import numpy as np
import torch
from torch import Tensor

from runtime.devices.cpu.cache_numbers import CACHE_NUMBERS
from runtime.devices.cpu.kernels.library import RecurrentLayer, RecurrentRows, RecurrentTokens, TokenLines
from runtime.devices.cpu.matrices import NUMBERS, Threads
from runtime.devices.recurrent import RecurrentSpec
from runtime.devices.state_rows import StateRows, StateTensors, VerifyRows

MAX_SIZE, MAX_KERNEL = 1024, 8  # of a head, and of a convolution
NORMS = {"none": 0, "gated": 1, "before_gate": 2, "nothing": 3}
NO_LINES = TokenLines()
# of a step: in front of the convolution, gates, rates and time steps
Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


class RowArrays:
    """Rows of tokens for the kernels."""

    def __init__(
        self,
        slots: np.ndarray,
        targets: np.ndarray,
        begins: np.ndarray,
        counts: np.ndarray,
        by_blocks: np.ndarray,
    ) -> None:
        """int64 arrays [rows]; see RecurrentRows."""
        self.arrays = [np.ascontiguousarray(x, np.int64) for x in (slots, targets, begins, counts, by_blocks)]
        self.rows = RecurrentRows(len(slots), *(array.ctypes.data for array in self.arrays))
        self.address = ctypes.addressof(self.rows)


def step_rows(rows: StateRows) -> RowArrays:
    """All rows of a step. Rows of drafts are computed as decode rows are, and leave no states."""
    decodes = rows.decodes.numpy()
    verified = () if rows.verifies is None else rows.verifies.ranges
    table = np.zeros((len(decodes) + len(verified) + len(rows.extends), 5), np.int64)
    own = slice(len(decodes))
    table[own, 0] = table[own, 1] = decodes
    table[own, 2], table[own, 3] = np.arange(len(decodes)), 1
    at = len(decodes)
    for slot, begin, count in verified:
        table[at] = slot, -1, begin, count, 0
        at += 1
    for slot, begin, count in rows.extends:
        table[at] = slot, slot, begin, count, 1
        at += 1
    return RowArrays(*table.T)


class CpuRecurrent:
    """Recurrent layers, one after another in memory that they share."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.functions = threads.functions
        self.handle: int = self.functions.kernels_recurrent(threads.handle)
        weakref.finalize(self, self.functions.kernels_free_recurrent, self.handle).atexit = False
        self.scratches = [torch.empty(0), torch.empty(0)]
        self.latest: tuple[StateRows, RowArrays] | None = None  # layers of a step have the same rows

    def open(self, spec: RecurrentSpec) -> "CpuRecurrentLayer | None":
        """See RecurrentKernels."""
        fits = (
            spec.conv_weight.dtype in NUMBERS
            and 2 <= spec.conv_weight.shape[2] <= MAX_KERNEL
            and (spec.kind == "conv" or max(spec.key_dim, spec.value_dim) <= MAX_SIZE)
        )
        return CpuRecurrentLayer(self, spec) if fits else None

    def rows(self, rows: StateRows) -> RowArrays:
        """The rows of the step at hand."""
        if self.latest is None or self.latest[0] is not rows:
            self.latest = rows, step_rows(rows)
        return self.latest[1]

    def scratch(self, which: int, count: int, width: int) -> Tensor:
        """float32 [count, width] until the next layer, in memory that is taken once."""
        if self.scratches[which].numel() < count * width:
            self.scratches[which] = torch.empty(count * width)
        return self.scratches[which][: count * width].view(count, width)

    def run(self, layer: RecurrentLayer, rows: RowArrays, tokens: RecurrentTokens, *, is_conv: bool) -> None:
        """Computes `tokens`. Raises torch.OutOfMemoryError."""
        arguments = (ctypes.addressof(layer), rows.address, ctypes.addressof(tokens), int(is_conv))
        if self.functions.kernels_recur(self.threads.handle, self.handle, *arguments):
            raise torch.OutOfMemoryError("no memory for a recurrent layer")


def floats(tensor: Tensor | None) -> Tensor | None:
    """A copy for the kernels, float32."""
    return None if tensor is None else tensor.detach().float().clone(memory_format=torch.contiguous_format)


def lines(tensor: Tensor) -> TokenLines:
    """A tensor [T, width] whose rows are contiguous."""
    assert tensor.stride(1) == 1 or tensor.shape[1] == 1, "lines of numbers that are apart"
    return TokenLines(
        tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), CACHE_NUMBERS[tensor.dtype]
    )


class CpuRecurrentLayer:
    """See RecurrentKernel."""

    def __init__(self, kernels: CpuRecurrent, spec: RecurrentSpec) -> None:
        self.kernels, self.is_conv, self.has_norm = kernels, spec.kind == "conv", spec.norm != "nothing"
        self.channels = len(spec.conv_weight)
        self.width = spec.value_heads * spec.value_dim
        self.weights = {
            "conv_weight": floats(spec.conv_weight[:, 0].T),
            "conv_bias": floats(spec.conv_bias),
            "step_bias": floats(spec.step_bias),
            "log_decay": floats(spec.log_decay),
            "skip": floats(spec.skip),
            "norm_weight": floats(spec.norm_weight),
        }
        self.layer = RecurrentLayer(
            is_delta=spec.kind == "delta",
            key_heads=0 if self.is_conv else spec.key_heads,
            value_heads=1 if self.is_conv else spec.value_heads,
            key_dim=spec.key_dim,
            value_dim=self.channels if self.is_conv else spec.value_dim,
            kernel=spec.conv_weight.shape[2],
            activates=not self.is_conv,
            least_step=spec.step_limits[0],
            most_step=spec.step_limits[1],
            norm=NORMS[spec.norm],
            norm_size=spec.norm_size,
            norm_period=1 if spec.norm_weight is None else len(spec.norm_weight),
            eps=spec.eps,
            **{name: tensor.data_ptr() for name, tensor in self.weights.items() if tensor is not None},
        )

    def forward(
        self,
        mixed: Tensor,
        gate: Tensor | None,
        rate: Tensor | None,
        step: Tensor | None,
        states: StateTensors,
        rows: StateRows,
    ) -> Tensor:
        """See RecurrentKernel. Raises torch.OutOfMemoryError."""
        inputs, count = (mixed, gate, rate, step), len(mixed)
        convolved = self.kernels.scratch(0, count, self.channels)
        out = None if self.is_conv else self.kernels.scratch(1, count, self.width)
        normed = mixed.new_empty(count, self.width) if self.has_norm else None
        self._run(states, self.kernels.rows(rows), inputs, convolved, out, normed)
        if (verifies := rows.verifies) is not None:
            kept = (None if x is None else x[verifies.tokens] for x in (rate, step))
            self.keep(states, verifies, mixed[verifies.tokens], *kept)
        if normed is not None:
            return normed
        return (convolved if out is None else out).to(mixed.dtype, copy=True)

    def _run(
        self,
        states: StateTensors,
        rows: RowArrays,
        inputs: Inputs,
        convolved: Tensor,
        out: Tensor | None = None,
        normed: Tensor | None = None,
    ) -> None:
        """Without `out`, states alone are computed."""
        self.point_at(states)
        tokens = RecurrentTokens(
            len(convolved),
            *(NO_LINES if x is None else lines(x) for x in inputs),
            convolved.data_ptr(),
            None if out is None else out.data_ptr(),
            NO_LINES if normed is None else lines(normed),
        )
        self.kernels.run(self.layer, rows, tokens, is_conv=self.is_conv)

    def point_at(self, states: StateTensors) -> None:
        """The states are in these tensors from now on."""
        layer = self.layer
        layer.conv_state, layer.conv_kind = states[0].data_ptr(), CACHE_NUMBERS[states[0].dtype]
        if not self.is_conv:
            layer.state, layer.state_kind = states[1].data_ptr(), CACHE_NUMBERS[states[1].dtype]

    def keep(
        self, states: StateTensors, rows: VerifyRows, mixed: Tensor, rate: Tensor | None, step: Tensor | None
    ) -> None:
        """Keeps the inputs of the tokens of rows of drafts, [tokens, ...] each, which `advance` computes
        again as far as they are accepted."""
        inputs = (mixed, None, rate, step)
        counts = np.array([count for _, _, count in rows.ranges])
        begins = counts.cumsum() - counts

        def advance(counts: Tensor, slots: Tensor) -> None:
            arrays = RowArrays(
                rows.slots.numpy(), slots.numpy(), begins, counts.numpy(), np.zeros_like(begins)
            )
            self._run(states, arrays, inputs, self.kernels.scratch(0, len(inputs[0]), self.channels))

        rows.advances.append(advance)
