"""The whole forward pass of a decoder in one call of the kernels.

Models of the Llama line (models/llama.py) and Gemma 2 are known: their layers are read, once, into a program
(program.py). What a program does not compute falls back to the layers, one operator after another:
`problem_of` names what in a model, and `forward` returns None where it is in the step. Residuals and
activations are float32 whatever the weights' dtype is.
"""

import torch
from torch import Tensor

from runtime.devices.base import ForwardBatch
from runtime.devices.cpu.attention_plan import CpuAttentionPlan
from runtime.devices.cpu.kernels.library import Heads, Step
from runtime.devices.cpu.matrices import NUMBERS, Matrix, Threads
from runtime.devices.cpu.program import Buffer, Program, Then
from runtime.layers.feed_forward import FeedForward
from runtime.layers.linear import Linear
from runtime.layers.norm import RMSNorm
from runtime.models.base import Model
from runtime.models.gemma import Gemma, GemmaDecoderLayer
from runtime.models.llama import Llama, LlamaDecoderLayer, SelfAttention

MAX_DIM = 256  # attention::MAX_DIM
MAX_GROUP = 64  # attention::MAX_VECTORS
MAX_WIDTH = 16384  # layers::Prepare::MAX_WIDTH
GATES = {"silu": Then.SILU_AND_MUL, "gelu_tanh": Then.GELU_AND_MUL}
KEPT_POSITIONS = 1024  # of the first tables of cosines and sines, which double as sequences grow


def problem_of(model: Model, kv: list[tuple[Tensor, Tensor]], lanes: int) -> str | None:
    """Why the layers of this model are computed one by one; None: they need not be."""
    if type(model) not in (Llama, Gemma):
        return f"{type(model).__name__} has layers of its own"
    if model.embed_tokens.ranks.size > 1:
        return "the model is split over several ranks"
    for layer, (keys, _) in zip(model.layers, kv, strict=True):
        if not isinstance(layer, LlamaDecoderLayer | GemmaDecoderLayer):
            return f"{type(layer).__name__} is not known"
        if problem := _layer_problem(layer, keys, lanes):
            return problem
    return None


def _layer_problem(layer: LlamaDecoderLayer | GemmaDecoderLayer, keys: Tensor, lanes: int) -> str | None:
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not SelfAttention or not isinstance(mlp, FeedForward):
        return "a layer has experts or latent attention"
    dim, heads = keys.shape[2], attention.qkv_proj.heads
    if dim % lanes or dim > MAX_DIM or heads[0] // heads[1] > MAX_GROUP:
        return f"heads of {dim} do not fit the kernels' vectors of {lanes}"
    if keys.dtype not in NUMBERS or attention.attention.cache_scales is not None:
        return f"the cache is {keys.dtype}"
    norms = [part for part in vars(layer).values() if isinstance(part, RMSNorm)]
    if any(norm.shift is not None for norm in norms) or norms[0].weight.tensor.numel() > MAX_WIDTH:
        return "a norm has a bias, or rows are too wide"
    if mlp.activation not in GATES:
        return f"{mlp.activation} is not known"
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    if not all(isinstance(linear.packed, Matrix) for linear in linears):
        return "a weight is quantized in a way that the kernels do not compute"
    return None


class DecoderProgram:
    """A model and its cache as one program."""

    def __init__(self, threads: Threads, model: Llama, kv: list[tuple[Tensor, Tensor]]) -> None:
        """`problem_of(model, kv, ...)` is None."""
        self.model = model
        self.num_pools = 1 + any(layer.self_attn.attention.pool for layer in model.layers)
        self.width = model.embed_tokens.hidden_size
        self.program = Program(threads)
        self.rotary = self.program.rotary()
        self.tables: tuple[Tensor, Tensor] | None = None  # of the first positions
        self._read_model(kv)

    def _read_model(self, kv: list[tuple[Tensor, Tensor]]) -> None:
        program, model = self.program, self.model
        x = program.buffer(self.width)
        scale = model.embed_scale if isinstance(model, Gemma) else 1.0
        program.embed(self._embedding(), scale, x)
        rest = _Buffers(program, model.layers[0], self.width)
        for layer, pair in zip(model.layers, kv, strict=True):
            assert isinstance(layer, LlamaDecoderLayer | GemmaDecoderLayer)
            self._read_layer(layer, pair, x, rest)
        program.output(x)

    def _embedding(self) -> Tensor | Matrix:
        shared, weight = self.model.embed_tokens.packed, self.model.embed_tokens.weight
        if isinstance(shared, Matrix):
            return shared
        assert weight is not None
        return weight.tensor

    def _read_layer(
        self,
        layer: LlamaDecoderLayer | GemmaDecoderLayer,
        kv: tuple[Tensor, Tensor],
        x: Buffer,
        rest: "_Buffers",
    ) -> None:
        program, attention, mlp = self.program, layer.self_attn, layer.mlp
        assert isinstance(attention, SelfAttention) and isinstance(mlp, FeedForward)
        is_gemma = isinstance(layer, GemmaDecoderLayer)
        inputs = rest.inputs_of(attention.qkv_proj)
        program.prepare(x, inputs, layer.input_layernorm.weight.tensor, layer.input_layernorm.eps)
        self._linear(attention.qkv_proj, inputs, rest.qkv, Then.STORE)
        program.attention(rest.qkv, rest.attended, self._heads(attention, kv))
        inputs = rest.inputs_of(attention.o_proj)
        program.prepare(rest.attended, inputs)
        self._add(attention.o_proj, inputs, x, layer.post_attention_layernorm if is_gemma else None, rest)
        before = layer.pre_feedforward_layernorm if is_gemma else layer.post_attention_layernorm
        inputs = rest.inputs_of(mlp.gate_up_proj)
        program.prepare(x, inputs, before.weight.tensor, before.eps)
        self._linear(mlp.gate_up_proj, inputs, rest.inner, GATES[mlp.activation])
        inputs = rest.inputs_of(mlp.down_proj)
        program.prepare(rest.inner, inputs)
        self._add(mlp.down_proj, inputs, x, layer.post_feedforward_layernorm if is_gemma else None, rest)

    def _add(self, linear: Linear, inputs: Buffer, x: Buffer, norm: RMSNorm | None, rest: "_Buffers") -> None:
        """Adds a product to the residual, behind a norm if there is one."""
        if norm is None:
            return self._linear(linear, inputs, x, Then.ADD)
        self._linear(linear, inputs, rest.output, Then.STORE)
        self.program.norm(rest.output, x, norm.weight.tensor, norm.eps, adds=True)

    def _linear(self, linear: Linear, inputs: Buffer, out: Buffer, then: Then) -> None:
        assert isinstance(linear.packed, Matrix)
        bias = None if linear.bias is None else linear.bias.tensor
        self.program.linear(inputs, linear.packed, bias, out, then)

    def _heads(self, attention: SelfAttention, kv: tuple[Tensor, Tensor]) -> Heads:
        keep, scores = self.program.keep, attention.attention.scores
        q_heads, kv_heads, _ = attention.qkv_proj.heads
        q_norm, k_norm = attention.q_norm, attention.k_norm
        self.program.kept.extend(kv)
        return Heads(
            num_heads=q_heads,
            num_kv_heads=kv_heads,
            dim=kv[0].shape[2],
            q_norm=None if q_norm is None else keep(q_norm.weight.tensor),
            k_norm=None if k_norm is None else keep(k_norm.weight.tensor),
            eps=0.0 if q_norm is None else q_norm.eps,
            rotary=self.rotary,
            k_cache=kv[0].data_ptr(),
            v_cache=kv[1].data_ptr(),
            kind=NUMBERS[kv[0].dtype],
            pool=attention.attention.pool % self.num_pools,
            scale=scores.scale,
            cap=scores.cap,
            window=scores.window,
            sinks=keep(scores.sinks),
        )

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """The tokens' hidden states, float32 [T, hidden]; None: this step is for the layers."""
        plan = batch.attention
        assert isinstance(plan, CpuAttentionPlan)
        if batch.embeds is not None or plan.rows.parents:
            return None
        if batch.page_loads is not None:
            for index in range(len(batch.kv)):
                batch.page_loads.wait(index)
        self._grow_tables(plan.longest)
        out = torch.empty(len(batch.token_ids), self.width)
        slots, starts, counts = plan.row_arrays
        tables = plan.page_tables.contiguous()
        locations = [each.contiguous() for each in batch.locations]
        last = self.num_pools - 1
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
        )
        for pool, index in ((0, 0), (last, -1)):
            step.locations[pool] = locations[index].data_ptr()
            step.page_tables[pool] = tables[index].data_ptr()
        self.program.run(step)
        return out

    def _grow_tables(self, length: int) -> None:
        """Cosines and sines of at least `length` positions, each a function of its position alone."""
        if self.tables is not None and len(self.tables[0]) >= length:
            return
        count = KEPT_POSITIONS
        while count < length:
            count *= 2
        self.tables = self.model.rotary.angles(torch.arange(count))
        self.program.set_rotary(self.rotary, *self.tables)


class _Buffers:
    """What the layers of a model hand from phase to phase: all have the same widths."""

    def __init__(self, program: Program, layer: LlamaDecoderLayer | GemmaDecoderLayer, width: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, SelfAttention) and isinstance(mlp, FeedForward)
        self.program = program
        self.qkv = program.buffer(attention.qkv_proj.size)
        self.attended = program.buffer(attention.o_proj.inputs.size)
        self.inner = program.buffer(mlp.down_proj.inputs.size)
        self.output = program.buffer(width)
        self.inputs: dict[tuple[int, int], Buffer] = {}

    def inputs_of(self, linear: Linear) -> Buffer:
        """Rows in the form in which the weight is multiplied."""
        assert isinstance(linear.packed, Matrix)
        key = (linear.packed.kind, linear.packed.inputs)
        if key not in self.inputs:
            self.inputs[key] = self.program.buffer_for(linear.packed)
        return self.inputs[key]


class DecoderPrograms:
    """See ForwardPrograms. Makes a model's program when it is first asked for a step, and anew when the
    model or its cache is another."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.model: Model | None = None
        self.cache: int | None = None
        self.program: DecoderProgram | None = None

    def forward(self, model: Model, batch: ForwardBatch) -> Tensor | None:
        """See ForwardPrograms.forward."""
        if not batch.kv:
            return None
        cache = batch.kv[0][0].data_ptr()
        if model is not self.model or cache != self.cache:
            lanes = self.threads.library.lanes
            self.model, self.cache, self.program = model, cache, None
            if problem_of(model, batch.kv, lanes) is None:
                assert isinstance(model, Llama)
                self.program = DecoderProgram(self.threads, model, batch.kv)
        return None if self.program is None else self.program.forward(batch)
