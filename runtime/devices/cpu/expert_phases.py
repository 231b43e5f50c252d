"""Feed-forwards with experts (ExpertsSpec of devices/decoder_spec.py) as phases of a program."""

import ctypes
from collections.abc import Callable

from runtime.devices.cpu.kernels.library import Routing
from runtime.devices.cpu.matrices import Matrix
from runtime.devices.cpu.moe import ExpertStack
from runtime.devices.cpu.program import Buffer, Program, Then
from runtime.devices.decoder_spec import DenseSpec, ExpertsSpec, LinearSpec, NormSpec

MAX_EXPERTS = 1024  # experts::MAX_EXPERTS
MAX_GROUPS = 64  # experts::MAX_GROUPS
# adds a product of floats to the program: source, weight, out, and what happens to the results
AddLinear = Callable[[Buffer, LinearSpec, Buffer, Then], None]
GATES = {"silu": Then.SILU_AND_MUL, "gelu_tanh": Then.GELU_AND_MUL}


def experts_problem(spec: ExpertsSpec) -> str | None:
    """What the kernels do not compute of these experts, products of all tokens aside; None: they compute
    them."""
    if spec.router.outputs > MAX_EXPERTS or spec.routing.num_groups > MAX_GROUPS:
        return f"a router of {spec.router.outputs} experts"
    if not isinstance(spec.packed, ExpertStack):
        return "experts are quantized in a way that the kernels do not compute"
    return None


def products_of_all(spec: DenseSpec | ExpertsSpec) -> list[LinearSpec]:
    """The products of a feed-forward that all tokens pass."""
    if isinstance(spec, DenseSpec):
        return [spec.gate_up, spec.down]
    shared = [] if spec.shared is None else products_of_all(spec.shared)
    return [spec.router, *shared, *([] if spec.shared_gate is None else [spec.shared_gate])]


class ExpertPhases:
    """Adds layers with experts to a program. They share buffers."""

    def __init__(self, program: Program, width: int) -> None:
        """`width`: of the hidden states."""
        self.program = program
        self.functions = program.functions
        self.width = width
        self.buffers: dict[tuple[object, ...], Buffer] = {}
        self.counters: list[tuple[int, ExpertsSpec]] = []
        self.counted: int | None = None  # address of the first layer's counts

    def add(
        self, spec: ExpertsSpec, source: Buffer, norm: NormSpec, out: Buffer, linear: AddLinear, *, adds: bool
    ) -> None:
        """From floats behind a norm to floats. `experts_problem(spec)` is None."""
        program, normed = self.program, self._floats("normed", self.width)
        program.norm(source, normed, norm.weight, norm.eps, adds=False)
        pairs = self._route(spec, normed, linear)
        stack = spec.packed
        assert isinstance(stack, ExpertStack)
        first, second, top_k = stack.gate_up[0], stack.down[0], spec.routing.top_k
        inner = self._of("pairs", second.inputs, top_k, lambda: program.buffer(second.inputs, top_k))
        counter = self.functions.program_counter(program.handle)
        self.counters.append((counter, spec))
        program.kept.append(stack)
        inputs, refit = (self._pair_inputs(matrix, top_k) for matrix in (first, second))
        self.functions.program_experts(
            program.handle, stack.handle, pairs, counter, normed, inputs, inner, refit, out, adds
        )
        if spec.shared is not None:
            self._add_shared(spec.shared, spec.shared_gate, normed, out, linear)

    def _route(self, spec: ExpertsSpec, normed: Buffer, linear: AddLinear) -> int:
        """experts::Assignment*, which holds the experts of the step's tokens behind this phase."""
        program, given, count = self.program, spec.routing, spec.router.outputs
        logits = self._floats("logits", count)
        linear(normed, spec.router, logits, Then.STORE)
        pairs = self._of(
            "assignment",
            count,
            given.top_k,
            lambda: self.functions.program_assignment(program.handle, count, given.top_k),
        )
        routing = Routing(
            top_k=given.top_k,
            is_sigmoid=given.score == "sigmoid",
            num_groups=given.num_groups,
            top_groups=given.top_groups,
            best_of_group=2 if given.group_score == "two largest" else 1,
            normalizes=given.normalizes,
            scale=given.scale,
        )
        bias = program.keep(spec.correction_bias)
        self.functions.program_route(program.handle, logits, ctypes.addressof(routing), bias, pairs)
        return pairs

    def _add_shared(
        self, spec: DenseSpec, gate: LinearSpec | None, normed: Buffer, out: Buffer, linear: AddLinear
    ) -> None:
        inner = self._floats("inner", spec.down.inputs)
        linear(normed, spec.gate_up, inner, GATES[spec.gate])
        if gate is not None:
            weight = self._floats("gate", 1)
            linear(normed, gate, weight, Then.STORE)
            self.functions.program_weigh(self.program.handle, weight, inner)
        linear(inner, spec.down, out, Then.ADD)

    def _floats(self, name: str, width: int) -> Buffer:
        return self._of(name, width, lambda: self.program.buffer(width))

    def _pair_inputs(self, matrix: Matrix, top_k: int) -> Buffer:
        key = ("pair inputs", matrix.kind, matrix.inputs, top_k)
        return self._of(*key, lambda: self.program.buffer_for(matrix, top_k))

    def _of(self, *arguments: object) -> int:
        """What the last argument makes, once for each of the others."""
        *key, make = arguments
        assert callable(make)
        if tuple(key) not in self.buffers:
            self.buffers[tuple(key)] = make()
        return self.buffers[tuple(key)]

    def count(self) -> None:
        """Lets the next step add up the tokens of experts where the layers want it now."""
        if not self.counters:
            return
        first = self.counters[0][1].counts()
        address = None if first is None else first.data_ptr()
        if address == self.counted:
            return
        self.counted = address
        for counter, spec in self.counters:
            counts = spec.counts()
            address = None if counts is None else counts.data_ptr()
            self.functions.program_set_counter(counter, address)
