"""Recurrent layers (MixerSpec of devices/decoder_spec.py) as phases of a program."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.devices.cpu.kernels.library import Between, Kept, Place, Run
from runtime.devices.cpu.program import Buffer, Program
from runtime.devices.cpu.recurrent import CpuRecurrentLayer, RowArrays
from runtime.devices.decoder_spec import Columns, LinearSpec, MixerSpec, NormSpec
from runtime.devices.state_rows import StateRows, VerifyRows

# adds a product behind a norm to the program: source, norm, weight, out, and whether the product before it
# has the same source and norm
AddLinear = Callable[[Buffer, NormSpec, LinearSpec, Buffer, bool], None]


def mixer_problem(spec: MixerSpec) -> str | None:
    """What the kernels do not compute of this layer, its products aside; None: they compute it."""
    kernel = spec.kernel
    if not isinstance(kernel, CpuRecurrentLayer):
        return "a recurrent layer that the kernels do not compute"
    return None if kernel.is_conv or kernel.has_norm else "a recurrent layer whose norm is elsewhere"


def multiply(program: Program, a: Place, b: Place, out: Buffer, *, is_sigmoid: bool) -> None:
    """Adds a * b, or a * sigmoid(b), of as many numbers as `out` has."""
    addresses = ctypes.addressof(a), ctypes.addressof(b)
    program.functions.program_multiply(program.handle, *addresses, is_sigmoid, out)


@dataclass(slots=True)
class _Mixer:
    """A recurrent layer of the program. The kernels read `kernel.layer` and `kept` in every step."""

    kernel: CpuRecurrentLayer
    place: int
    kept: Kept
    has_rate: bool

    def keep(self, rows: VerifyRows) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Memory for what rows of drafts bring to this layer in the step at hand."""
        kernel, count = self.kernel, len(rows.tokens)
        heads = kernel.layer.value_heads
        mixed = torch.empty(count, kernel.channels)
        rate = torch.empty(count, heads) if self.has_rate else None
        step = None if kernel.is_conv else torch.empty(count, heads)
        self.kept.count, self.kept.tokens = count, rows.tokens.data_ptr()
        self.kept.mixed = mixed.data_ptr()
        self.kept.rate, self.kept.step = (None if x is None else x.data_ptr() for x in (rate, step))
        return mixed, rate, step


class RecurrentPhases:
    """Adds recurrent layers to a program. They share buffers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.buffers: dict[tuple[str, int], Buffer] = {}
        self.mixers: list[_Mixer] = []
        self.latest: RowArrays | None = None  # of the step at hand
        self.first: Tensor | None = None  # the first of the states that the layers read

    def add(self, spec: MixerSpec, source: Buffer, linear: AddLinear) -> Buffer:
        """From floats to what `spec.o` reads. `mixer_problem(spec)` is None. Raises
        torch.OutOfMemoryError."""
        kernel = spec.kernel
        assert isinstance(kernel, CpuRecurrentLayer)
        projected = [
            self._floats(f"projection {index}", each.outputs) for index, each in enumerate(spec.projections)
        ]
        for index, (each, out) in enumerate(zip(spec.projections, projected, strict=True)):
            linear(source, spec.norm, each, out, index > 0)
        mixed = self._place("mixed", spec.mixed, projected)
        if spec.input_gate:
            gated = self._floats("gated", kernel.channels)
            gate = self._place("input gate", spec.input_gate, projected)
            multiply(self.program, mixed, gate, gated, is_sigmoid=False)
            mixed = Place(gated, 0)
        normed = self._floats("normed", kernel.channels if kernel.is_conv else kernel.width)
        rows = Between(
            mixed=mixed,
            gate=self._place("gate", spec.gate, projected),
            rate=self._place("rate", spec.rate, projected),
            step=self._place("step", spec.step, projected),
            convolved=self._floats("convolved", kernel.channels),
            out=None if kernel.is_conv else self._floats("out", kernel.width),
            normed=normed,
        )
        mixer = _Mixer(kernel, spec.place, Kept(), bool(spec.rate))
        addresses = (ctypes.addressof(part) for part in (kernel.layer, mixer.kept, rows))
        functions, handle = self.program.functions, self.program.handle
        if functions.program_recurrent(handle, *addresses, kernel.is_conv):
            raise torch.OutOfMemoryError("no memory for a recurrent layer")
        self.mixers.append(mixer)
        return normed

    def begin(self, rows: StateRows | None) -> int | None:
        """Before a step: where its rows find their states, recurrent::Rows*."""
        if not self.mixers:
            return None
        assert rows is not None, "recurrent layers in a batch without states"
        if rows.tensors[0][0] is not self.first:
            self.first = rows.tensors[0][0]
            for mixer in self.mixers:
                mixer.kernel.point_at(rows.tensors[mixer.place])
        verifies = rows.verifies
        for mixer in self.mixers:
            mixer.kept.count = 0
            if verifies is not None:
                mixer.kernel.keep(rows.tensors[mixer.place], verifies, *mixer.keep(verifies))
        self.latest = self.mixers[0].kernel.kernels.rows(rows)
        return self.latest.address

    def _place(self, name: str, columns: tuple[Columns, ...], projected: list[Buffer]) -> Place:
        """Where these columns are: in a projection's rows, or in rows of their own."""
        if not columns:
            return Place(None, 0)
        first = columns[0]
        if len(columns) == 1 and first.factor == 1.0:
            return Place(projected[first.projection], first.begin)
        runs, at = list[Run](), 0
        for each in columns:
            assert each.projection == first.projection, "columns of several projections"
            runs.append(Run(each.begin, at, each.count, each.factor))
            at += each.count
        out = self._floats(name, at)
        array, source = (Run * len(runs))(*runs), projected[first.projection]
        self.program.functions.program_columns(
            self.program.handle, source, ctypes.addressof(array), len(runs), out
        )
        return Place(out, 0)

    def _floats(self, name: str, width: int) -> Buffer:
        if (name, width) not in self.buffers:
            self.buffers[name, width] = self.program.buffer(width)
        return self.buffers[name, width]
