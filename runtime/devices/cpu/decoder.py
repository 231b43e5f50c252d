"""The whole forward pass of a decoder in one call of the kernels.

A decoder's spec (devices/decoder_spec.py) is read, once, into a program (program.py). What the kernels do not
compute falls back to the model's layers, one operator after another: `problem_of` names what in a model, and
`forward` returns None where it is in the step. Residuals and activations are float32 whatever the weights'
dtype is.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import ForwardBatch, Memory
from runtime.devices.cpu.attention_plan import CpuAttentionPlan
from runtime.devices.cpu.cache_numbers import CACHE_NUMBERS, MAX_DIM
from runtime.devices.cpu.expert_phases import GATES, ExpertPhases, experts_problem, products_of_all
from runtime.devices.cpu.kernels.library import Heads, Place, Step
from runtime.devices.cpu.latent_phases import LatentPhases, latents_problem
from runtime.devices.cpu.matrices import Matrix, Threads
from runtime.devices.cpu.program import MULTIPLE, Buffer, Program, Then, num_phases
from runtime.devices.cpu.recurrent_phases import RecurrentPhases, mixer_problem, multiply
from runtime.devices.cpu.screen import LateScreen, add_head, can_screen
from runtime.devices.decoder_spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    ExpertsSpec,
    Forwarded,
    LatentSpec,
    LinearSpec,
    MixerSpec,
    NormSpec,
)
from runtime.devices.lora import LoraWeights
from runtime.devices.page_copies import PageSaves

MAX_INNER = 2048  # lora::MAX_INNER
MAX_WIDTH = 16384  # layers::Prepare::MAX_WIDTH
FIRST_POSITIONS = 1024  # of the tables of cosines and sines, which double as sequences grow

KeysValues = list[tuple[Tensor, ...]]


def problem_of(spec: DecoderSpec, kv: KeysValues) -> str | None:
    """What the kernels do not compute of this decoder; None: they compute it."""
    if spec.width > MAX_WIDTH:
        return f"rows of {spec.width} are too wide"
    caches = iter(kv)
    for layer in spec.layers:
        linears = _products_of(layer)
        if layer.attention is not None and (problem := _attention_problem(layer.attention, next(caches)[0])):
            return problem
        if layer.mixer is not None and (problem := mixer_problem(layer.mixer)):
            return problem
        if isinstance(layer.feed_forward, ExpertsSpec) and (problem := experts_problem(layer.feed_forward)):
            return problem
        if not all(isinstance(linear.packed, Matrix) for linear in linears):
            return "a weight is quantized in a way that the kernels do not compute"
        if any(_is_too_large(linear.lora) for linear in linears):
            return "adapters have too large ranks"
        if any(linear.lora is not None and linear.scale != 1.0 for linear in linears):
            return "adapters of a product with a factor"
    return None


def _attention_problem(attention: AttentionSpec | LatentSpec, keys: Tensor) -> str | None:
    if isinstance(attention, LatentSpec):
        return latents_problem(attention, keys)
    if attention.dim > MAX_DIM:
        return f"heads of {attention.dim} are too wide"
    return None if keys.dtype in CACHE_NUMBERS else f"the cache is {keys.dtype}"


def _products_of(layer: DecoderLayerSpec) -> list[LinearSpec]:
    """The products of a layer that all tokens pass."""
    found = [] if layer.attention is None else _products_of_attention(layer.attention)
    if layer.mixer is not None:
        found += [*layer.mixer.projections, layer.mixer.o]
    return found if layer.feed_forward is None else [*found, *products_of_all(layer.feed_forward)]


def _products_of_attention(attention: AttentionSpec | LatentSpec) -> list[LinearSpec]:
    if isinstance(attention, AttentionSpec):
        return [attention.qkv, attention.o]
    return [attention.down, attention.o, *([] if attention.queries is None else [attention.queries])]


def _is_too_large(lora: LoraWeights | None) -> bool:
    return lora is not None and lora.a.shape[1] * lora.a.shape[2] > MAX_INNER


class DecoderProgram:
    """A decoder and its cache as one program. See ForwardProgram."""

    def __init__(self, threads: Threads, spec: DecoderSpec, kv: KeysValues, memory: Memory) -> None:
        """`problem_of(spec, kv)` is None."""
        self.spec = spec
        self.screen: LateScreen | None = None
        attentions = [layer.attention for layer in spec.layers if layer.attention is not None]
        self.num_pools = 1 + any(attention.pool for attention in attentions)
        self.program = Program(threads)
        self.rotary = self.program.rotary()
        self.tables: tuple[Tensor, Tensor] | None = None  # of the first positions
        buffers = _Buffers(self.program, spec.width)
        self.experts = ExpertPhases(self.program, spec.width)
        self.latents = LatentPhases(self.program, self.rotary)
        self.mixers = RecurrentPhases(self.program)
        assert isinstance(spec.embedding, Tensor | Matrix)
        self.stored: list[int] = []  # for each layer with a cache, the phases that it is stored behind
        self.program.embed(spec.embedding, spec.embed_scale, buffers.x)
        caches = iter(kv)
        for layer in spec.layers:
            self._read_layer(layer, caches, buffers)
        self.program.output(buffers.x)
        if (head := spec.head) is not None:
            assert isinstance(head.packed, Matrix)
            self._read_head(head.norm, head.packed, buffers.x, memory, sum(x.nbytes for kv in kv for x in kv))

    def _read_head(self, norm: NormSpec, head: Matrix, x: Buffer, memory: Memory, cache_bytes: int) -> None:
        if not can_screen(head):
            return self.program.head(x, norm.weight, norm.eps, head)
        found = add_head(self.program, x, norm.weight, norm.eps, head)
        self.screen = LateScreen(self.program, found, head, memory, cache_bytes)

    def _read_layer(
        self, layer: DecoderLayerSpec, caches: Iterator[tuple[Tensor, Tensor]], rows: "_Buffers"
    ) -> None:
        mixed = None if layer.mixer is None else self._mix(layer.mixer, rows)
        if mixed is not None and layer.mixer is not None and layer.attention is None:
            self._add(mixed, layer.mixer.o, None, rows)
        elif mixed is not None and layer.mixer is not None:  # attention reads the same rows, so they wait
            self._linear(mixed, None, layer.mixer.o, rows.output, Then.STORE, rows)
        if layer.attention is not None:
            attended = self._attend(layer.attention, layer.before_attention, next(caches), rows)
            self.stored.append(num_phases(self.program))
            self._add(attended, layer.attention.o, layer.after_attention, rows)
            if mixed is not None:
                self.program.norm(rows.output, rows.x, None, adds=True)
        self._add_feed_forward(layer, rows)

    def _mix(self, mixer: MixerSpec, rows: "_Buffers") -> Buffer:
        """What a recurrent layer makes of the hidden states, before its last product."""

        def linear(source: Buffer, norm: NormSpec, of: LinearSpec, out: Buffer, is_same: bool) -> None:
            self._linear(source, norm, of, out, Then.STORE, rows, is_same=is_same)

        return self.mixers.add(mixer, rows.x, linear)

    def _attend(
        self,
        attention: AttentionSpec | LatentSpec,
        norm: NormSpec | None,
        kv: tuple[Tensor, Tensor],
        rows: "_Buffers",
    ) -> Buffer:
        """What attention makes of the hidden states, before its last product."""
        first, *_ = _products_of_attention(attention)
        projected = rows.floats("projected", first.outputs)
        attended = rows.floats("attended", attention.o.inputs)
        self._linear(rows.x, norm, first, projected, Then.STORE, rows)
        if isinstance(attention, LatentSpec):

            def linear(source: Buffer, norm: NormSpec | None, of: LinearSpec, out: Buffer) -> None:
                self._linear(source, norm, of, out, Then.STORE, rows)

            self.latents.add(attention, kv, projected, attended, linear)
            return attended
        self.program.attention(projected, attended, self._heads(attention, kv))
        if attention.has_gate:
            gates = (attention.num_heads + 2 * attention.num_kv_heads) * attention.dim
            places = Place(attended, 0), Place(projected, gates)
            multiply(self.program, *places, attended, is_sigmoid=True)
        return attended

    def _add_feed_forward(self, layer: DecoderLayerSpec, rows: "_Buffers") -> None:
        dense, norm = layer.feed_forward, layer.before_feed_forward
        if dense is None or norm is None:
            return
        if isinstance(dense, ExpertsSpec):
            return self._add_experts(dense, norm, layer.after_feed_forward, rows)
        inner = rows.floats("inner", dense.down.inputs)
        self._linear(rows.x, norm, dense.gate_up, inner, GATES[dense.gate], rows)
        self._add(inner, dense.down, layer.after_feed_forward, rows)

    def _add_experts(
        self, spec: ExpertsSpec, norm: NormSpec, after: NormSpec | None, rows: "_Buffers"
    ) -> None:
        def linear(source: Buffer, of: LinearSpec, out: Buffer, then: Then) -> None:
            self._linear(source, None, of, out, then, rows)

        if after is None:
            return self.experts.add(spec, rows.x, norm, rows.x, linear, adds=True)
        self.experts.add(spec, rows.x, norm, rows.output, linear, adds=False)
        self.program.norm(rows.output, rows.x, after.weight, after.eps, adds=True)

    def _linear(
        self,
        source: Buffer,
        norm: NormSpec | None,
        linear: LinearSpec,
        out: Buffer,
        then: Then,
        rows: "_Buffers",
        *,
        is_same: bool = False,
    ) -> None:
        """A product, behind a norm if there is one, with what adapters add to it. `is_same`: the product
        before it has the same source and norm."""
        assert isinstance(linear.packed, Matrix)
        inputs = rows.inputs_of(linear.packed)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        if not is_same or inputs != rows.prepared:
            self.program.prepare(source, inputs, weight, eps)
        rows.prepared = inputs
        if linear.lora is None:
            return self.program.linear(inputs, linear.packed, linear.bias, out, then, linear.scale)
        is_gated = then in GATES.values()
        sums = rows.floats("gates and ups", linear.outputs) if is_gated else out
        self.program.linear(inputs, linear.packed, linear.bias, sums, Then.STORE if is_gated else then)
        self.program.lora(source, weight, eps, linear.lora, sums)
        if is_gated:
            self.program.act(sums, out, then, linear.scale)

    def _add(self, source: Buffer, linear: LinearSpec, norm: NormSpec | None, rows: "_Buffers") -> None:
        """Adds a product to the residual, with a norm between them if there is one."""
        if norm is None:
            return self._linear(source, None, linear, rows.x, Then.ADD, rows)
        self._linear(source, None, linear, rows.output, Then.STORE, rows)
        self.program.norm(rows.output, rows.x, norm.weight, norm.eps, adds=True)

    def _heads(self, attention: AttentionSpec, kv: tuple[Tensor, Tensor]) -> Heads:
        keep, scores = self.program.keep, attention.scores
        q_norm, k_norm = attention.q_norm, attention.k_norm
        k_scale, v_scale = attention.cache_scales if kv[0].itemsize == 1 else (1.0, 1.0)
        self.program.kept.extend(kv)
        return Heads(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            dim=attention.dim,
            q_norm=None if q_norm is None else keep(q_norm.weight),
            k_norm=None if k_norm is None else keep(k_norm.weight),
            eps=0.0 if q_norm is None else q_norm.eps,
            rotary=self.rotary,
            k_cache=kv[0].data_ptr(),
            v_cache=kv[1].data_ptr(),
            kind=CACHE_NUMBERS[kv[0].dtype],
            pool=attention.pool % self.num_pools,
            scale=scores.scale,
            cap=scores.cap,
            window=scores.window,
            sinks=keep(scores.sinks),
            slopes=keep(scores.slopes),
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def forward(
        self, batch: ForwardBatch, samples: np.ndarray, lora_slots: np.ndarray | None
    ) -> Forwarded | None:
        """See ForwardProgram.forward."""
        plan = batch.attention
        assert plan is None or isinstance(plan, CpuAttentionPlan)
        if batch.positions.dim() == 2 or (plan is not None and not plan.is_plain):
            return None
        if batch.embeds is not None and batch.embeds[1].shape[1] > self.spec.width:  # DeepStack
            return None
        if batch.page_loads is not None:
            for index in range(len(batch.kv)):
                batch.page_loads.wait(index)
        out = torch.empty(len(batch.token_ids), self.spec.width)
        step = Step(
            num_tokens=len(batch.token_ids),
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            output=out.data_ptr(),
            lora_slots=None if lora_slots is None else lora_slots.ctypes.data,
            states=self.mixers.begin(batch.states),
        )
        pages = None if plan is None else self._set_pages(step, plan, batch.locations)
        if batch.embeds is not None:
            places, embeds = batch.embeds[0].contiguous(), batch.embeds[1].float().contiguous()
            step.num_embeds, step.embed_places, step.embeds = (
                len(places),
                places.data_ptr(),
                embeds.data_ptr(),
            )
        logits = None
        if self.spec.head is not None and len(samples):
            places, vocab_size = np.ascontiguousarray(samples, np.int64), self.spec.head.vocab_size
            logits = torch.empty(len(places), -(-vocab_size // MULTIPLE) * MULTIPLE)
            step.num_samples, step.sample_places = len(places), places.ctypes.data
            step.logits, logits = logits.data_ptr(), logits[:, :vocab_size]
            step.largest_only = batch.largest_only
            if batch.largest_only and self.screen is not None:
                self.screen.want(len(places))
        self.experts.count()
        self._run(step, batch.page_saves)
        del pages  # what the step points to
        return Forwarded(out, logits)

    def _run(self, step: Step, saves: PageSaves | None) -> None:
        """Computes the step, in as many calls as it takes to save pages of layers between them."""
        first = 0
        for layer, end in enumerate(self.stored if saves is not None else ()):
            if saves is not None and saves.wants(layer):
                self.program.run(step, first, end)
                saves.stored(layer)
                first = end
        self.program.run(step, first)

    def _set_pages(self, step: Step, plan: CpuAttentionPlan, locations: tuple[Tensor, ...]) -> object:
        """Says in `step` where the tokens' keys and values are. -> what must live as long as it"""
        self._grow_tables(plan.longest)
        slots, starts, counts = plan.row_arrays
        tables = plan.page_tables.contiguous()
        step.num_rows, step.block = len(slots), plan.rows.block_size
        step.slots, step.starts, step.counts = (each.ctypes.data for each in (slots, starts, counts))
        step.pages_per_slot, step.page_size = tables.shape[2], plan.page_size
        of_pools = [each.contiguous() for each in locations]
        table_bytes = tables.stride(0) * tables.itemsize
        for pool in range(self.num_pools):
            index = min(pool, len(of_pools) - 1)
            step.locations[pool] = of_pools[index].data_ptr()
            step.page_tables[pool] = tables.data_ptr() + index * table_bytes
        return slots, starts, counts, tables, of_pools

    def _grow_tables(self, length: int) -> None:
        """Cosines and sines of at least `length` positions, each a function of its position alone."""
        if self.tables is not None and len(self.tables[0]) >= length:
            return
        count = FIRST_POSITIONS
        while count < length:
            count *= 2
        cos, sin = self.spec.angles(torch.arange(count))
        self.tables = cos.contiguous(), sin.contiguous()
        self.program.set_rotary(self.rotary, *self.tables)


class _Buffers:
    """What the phases of a decoder hand on: layers with rows of one width share them."""

    def __init__(self, program: Program, width: int) -> None:
        """`width`: of the hidden states."""
        self.program = program
        self.x = program.buffer(width)
        self.output = program.buffer(width)
        self.inputs: dict[tuple[int, int], Buffer] = {}
        self.others: dict[tuple[str, int], Buffer] = {}
        self.prepared: Buffer | None = None  # the inputs of the latest product

    def floats(self, name: str, width: int) -> Buffer:
        """Rows of floats: layers differ in their widths."""
        if (name, width) not in self.others:
            self.others[name, width] = self.program.buffer(width)
        return self.others[name, width]

    def inputs_of(self, matrix: Matrix) -> Buffer:
        """Rows in the form in which this weight is multiplied."""
        key = (matrix.kind, matrix.inputs)
        if key not in self.inputs:
            self.inputs[key] = self.program.buffer_for(matrix)
        return self.inputs[key]


class DecoderPrograms:
    """See ForwardPrograms."""

    def __init__(self, threads: Threads, memory: Memory) -> None:
        self.threads = threads
        self.memory = memory

    def open(self, spec: DecoderSpec, kv: KeysValues) -> DecoderProgram | None:
        """See ForwardPrograms.open."""
        if problem_of(spec, kv) is not None:
            return None
        return DecoderProgram(self.threads, spec, kv, self.memory)
