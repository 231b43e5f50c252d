"""The whole forward pass of a decoder in one call of the kernels.

A decoder's spec (devices/decoder_spec.py) is read, once, into a program (program.py). What the kernels do not
compute falls back to the model's layers, one operator after another: `problem_of` names what in a model, and
`forward` returns None where it is in the step. Residuals and activations are float32 whatever the weights'
dtype is.
"""

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import ForwardBatch
from runtime.devices.cpu.attention_plan import CpuAttentionPlan
from runtime.devices.cpu.cache_numbers import CACHE_NUMBERS, MAX_DIM
from runtime.devices.cpu.expert_phases import GATES, ExpertPhases, experts_problem, products_of_all
from runtime.devices.cpu.kernels.library import Heads, Step
from runtime.devices.cpu.latent_phases import LatentPhases, latents_problem
from runtime.devices.cpu.matrices import Matrix, Threads
from runtime.devices.cpu.program import MULTIPLE, Buffer, Program, Then
from runtime.devices.decoder_spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    ExpertsSpec,
    Forwarded,
    LatentSpec,
    LinearSpec,
    NormSpec,
)
from runtime.devices.lora import LoraWeights

MAX_INNER = 2048  # lora::MAX_INNER
MAX_WIDTH = 16384  # layers::Prepare::MAX_WIDTH
FIRST_POSITIONS = 1024  # of the tables of cosines and sines, which double as sequences grow

KeysValues = list[tuple[Tensor, Tensor]]


def problem_of(spec: DecoderSpec, kv: KeysValues) -> str | None:
    """What the kernels do not compute of this decoder; None: they compute it."""
    if spec.width > MAX_WIDTH:
        return f"rows of {spec.width} are too wide"
    for layer, (keys, _) in zip(spec.layers, kv, strict=True):
        if problem := _attention_problem(layer.attention, keys):
            return problem
        linears = [*_products_of(layer.attention), *products_of_all(layer.feed_forward)]
        if isinstance(layer.feed_forward, ExpertsSpec) and (problem := experts_problem(layer.feed_forward)):
            return problem
        if not all(isinstance(linear.packed, Matrix) for linear in linears):
            return "a weight is quantized in a way that the kernels do not compute"
        if any(_is_too_large(linear.lora) for linear in linears):
            return "adapters have too large ranks"
    return None


def _attention_problem(attention: AttentionSpec | LatentSpec, keys: Tensor) -> str | None:
    if isinstance(attention, LatentSpec):
        return latents_problem(attention, keys)
    if attention.dim > MAX_DIM:
        return f"heads of {attention.dim} are too wide"
    return None if keys.dtype in CACHE_NUMBERS else f"the cache is {keys.dtype}"


def _products_of(attention: AttentionSpec | LatentSpec) -> list[LinearSpec]:
    if isinstance(attention, AttentionSpec):
        return [attention.qkv, attention.o]
    return [attention.down, attention.o, *([] if attention.queries is None else [attention.queries])]


def _is_too_large(lora: LoraWeights | None) -> bool:
    return lora is not None and lora.a.shape[1] * lora.a.shape[2] > MAX_INNER


class DecoderProgram:
    """A decoder and its cache as one program. See ForwardProgram."""

    def __init__(self, threads: Threads, spec: DecoderSpec, kv: KeysValues) -> None:
        """`problem_of(spec, kv)` is None."""
        self.spec = spec
        self.num_pools = 1 + any(layer.attention.pool for layer in spec.layers)
        self.program = Program(threads)
        self.rotary = self.program.rotary()
        self.tables: tuple[Tensor, Tensor] | None = None  # of the first positions
        buffers = _Buffers(self.program, spec)
        self.experts = ExpertPhases(self.program, spec.width)
        self.latents = LatentPhases(self.program, self.rotary)
        assert isinstance(spec.embedding, Tensor | Matrix)
        self.program.embed(spec.embedding, spec.embed_scale, buffers.x)
        for layer, pair in zip(spec.layers, kv, strict=True):
            self._read_layer(layer, pair, buffers)
        self.program.output(buffers.x)
        if (head := spec.head) is not None:
            assert isinstance(head.packed, Matrix)
            self.program.head(buffers.x, head.norm.weight, head.norm.eps, head.packed)

    def _read_layer(self, layer: DecoderLayerSpec, kv: tuple[Tensor, Tensor], rows: "_Buffers") -> None:
        attention = layer.attention
        first, *_ = _products_of(attention)
        self._linear(rows.x, layer.before_attention, first, rows.qkv, Then.STORE, rows)
        if isinstance(attention, LatentSpec):

            def linear(source: Buffer, norm: NormSpec | None, of: LinearSpec, out: Buffer) -> None:
                self._linear(source, norm, of, out, Then.STORE, rows)

            self.latents.add(attention, kv, rows.qkv, rows.attended, linear)
        else:
            self.program.attention(rows.qkv, rows.attended, self._heads(attention, kv))
        self._add(rows.attended, attention.o, layer.after_attention, rows)
        dense = layer.feed_forward
        if isinstance(dense, ExpertsSpec):
            return self._add_experts(dense, layer, rows)
        inner = rows.inner(dense.down.inputs)
        self._linear(rows.x, layer.before_feed_forward, dense.gate_up, inner, GATES[dense.gate], rows)
        self._add(inner, dense.down, layer.after_feed_forward, rows)

    def _add_experts(self, spec: ExpertsSpec, layer: DecoderLayerSpec, rows: "_Buffers") -> None:
        norm, after = layer.before_feed_forward, layer.after_feed_forward

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
    ) -> None:
        """A product, behind a norm if there is one, with what adapters add to it."""
        assert isinstance(linear.packed, Matrix)
        inputs = rows.inputs_of(linear.packed)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        self.program.prepare(source, inputs, weight, eps)
        if linear.lora is None:
            return self.program.linear(inputs, linear.packed, linear.bias, out, then)
        is_gated = then in GATES.values()
        sums = rows.gates_and_ups(linear.outputs) if is_gated else out
        self.program.linear(inputs, linear.packed, linear.bias, sums, Then.STORE if is_gated else then)
        self.program.lora(source, weight, eps, linear.lora, sums)
        if is_gated:
            self.program.act(sums, out, then)

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
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def forward(
        self, batch: ForwardBatch, samples: np.ndarray, lora_slots: np.ndarray | None
    ) -> Forwarded | None:
        """See ForwardProgram.forward."""
        plan = batch.attention
        assert isinstance(plan, CpuAttentionPlan)
        if plan.rows.parents:
            return None
        if batch.page_loads is not None:
            for index in range(len(batch.kv)):
                batch.page_loads.wait(index)
        self._grow_tables(plan.longest)
        out = torch.empty(len(batch.token_ids), self.spec.width)
        slots, starts, counts = plan.row_arrays
        tables = plan.page_tables.contiguous()
        locations = [each.contiguous() for each in batch.locations]
        step = Step(
            num_tokens=len(batch.token_ids),
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            num_rows=len(slots),
            slots=slots.ctypes.data,
            starts=starts.ctypes.data,
            counts=counts.ctypes.data,
            pages_per_slot=tables.shape[2],
            page_size=plan.page_size,
            output=out.data_ptr(),
            lora_slots=None if lora_slots is None else lora_slots.ctypes.data,
        )
        if batch.embeds is not None:
            places, embeds = batch.embeds[0].contiguous(), batch.embeds[1].float().contiguous()
            step.num_embeds, step.embed_places, step.embeds = (
                len(places),
                places.data_ptr(),
                embeds.data_ptr(),
            )
        table_bytes = tables.stride(0) * tables.itemsize
        for pool in range(self.num_pools):
            index = min(pool, len(locations) - 1)
            step.locations[pool] = locations[index].data_ptr()
            step.page_tables[pool] = tables.data_ptr() + index * table_bytes
        logits = None
        if self.spec.head is not None and len(samples):
            places, vocab_size = np.ascontiguousarray(samples, np.int64), self.spec.head.vocab_size
            logits = torch.empty(len(places), -(-vocab_size // MULTIPLE) * MULTIPLE)
            step.num_samples, step.sample_places = len(places), places.ctypes.data
            step.logits, logits = logits.data_ptr(), logits[:, :vocab_size]
        self.experts.count()
        self.program.run(step)
        return Forwarded(out, logits)

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
    """What the layers of a decoder hand from phase to phase: all layers have the same widths."""

    def __init__(self, program: Program, spec: DecoderSpec) -> None:
        layer = spec.layers[0]
        self.program = program
        self.x = program.buffer(spec.width)
        self.qkv = program.buffer(_products_of(layer.attention)[0].outputs)
        self.attended = program.buffer(layer.attention.o.inputs)
        self.output = program.buffer(spec.width)
        self.inputs: dict[tuple[int, int], Buffer] = {}
        self.inners: dict[int, Buffer] = {}
        self.sums: dict[int, Buffer] = {}

    def inner(self, width: int) -> Buffer:
        """Rows of act(gate) * up: layers with and without experts differ in their width."""
        if width not in self.inners:
            self.inners[width] = self.program.buffer(width)
        return self.inners[width]

    def gates_and_ups(self, width: int) -> Buffer:
        """Rows of [gate, up], where adapters add to them."""
        if width not in self.sums:
            self.sums[width] = self.program.buffer(width)
        return self.sums[width]

    def inputs_of(self, matrix: Matrix) -> Buffer:
        """Rows in the form in which this weight is multiplied."""
        key = (matrix.kind, matrix.inputs)
        if key not in self.inputs:
            self.inputs[key] = self.program.buffer_for(matrix)
        return self.inputs[key]


class DecoderPrograms:
    """See ForwardPrograms."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads

    def open(self, spec: DecoderSpec, kv: KeysValues) -> DecoderProgram | None:
        """See ForwardPrograms.open."""
        if problem_of(spec, kv) is not None:
            return None
        return DecoderProgram(self.threads, spec, kv)
