"""Steps with prompts in them as graphs of what lies between their attentions, captured once for a number of
tokens.

    inputs ─► [graph 0] ─► attention ─► [graph 1] ─► attention ─ ... ─► [graph L] ─► hidden states
               embedding, projections,   o_proj, feed-forward,           o_proj,
               keys and values stored    the next projections, stored    feed-forward

Attention is launched between the graphs with the plan of the step at hand, over its tokens alone, so graphs
depend on neither rows nor lengths. Recurrent layers are launched there as well, from convolution to norm:
they go on from the states of the step's sequences. What crosses from a graph to attention, or back, is copied
to tensors that all layers and sizes share: one more copy on each side, less than a hundredth of a layer's
time, and no tensor of a graph is read from outside. Tokens up to the size are padding: they are stored to the
padding page, and their results are dropped. Behind the first stage of a pipeline the first graph begins with
the hidden states of the stage before, in place of embeddings.

With LoRA adapters each size has a second set of graphs, for steps whose tokens have some: the first of them
sorts the tokens by adapter, and all layers read that. Copies of weights from host memory are launched between
the graphs (weight_offload.py).

All ranks of a model take the same way for the same plan, as in decode_graphs.py.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.base import Device, ForwardBatch
from runtime.devices.step_graphs import Graph, Graphs
from runtime.layers.lora import LoraAdapters
from runtime.layers.upload import upload_int64
from runtime.messages.ranks import Capture, Captured
from runtime.models.base import CompiledLayer, Pieces, PiecewiseModel, TokenMixer
from runtime.ranks.decode_graphs import attempt
from runtime.ranks.recurrent_states import RecurrentStates
from runtime.ranks.slots import Slots
from runtime.ranks.weight_offload import LayerOffload, PieceLayers

T = TypeVar("T")
FEW = 128  # a step of fewer tokens takes the time of one token: it is bound by reading weights


@dataclass(frozen=True, slots=True)
class Cut:
    """An attention between two graphs."""

    layer: TokenMixer
    queries: tuple[Tensor, ...]  # [size, ...] each, of the shared tensors
    attended: Tensor


@dataclass(frozen=True, slots=True)
class Pass(Generic[T]):
    """What was made of each piece of one size, and what is between them: one cut less than pieces."""

    pieces: list[T]
    cuts: list[Cut]
    hidden: Tensor  # [size, hidden], behind the last one


@dataclass(frozen=True, slots=True)
class Piece:
    """A captured piece, and the offloaded layers that begin and end in it."""

    graph: Graph
    layers: PieceLayers


@dataclass(frozen=True, slots=True)
class Recorded:
    """The graphs captured for one number of tokens."""

    plain: Pass[Piece]
    adapted: Pass[Piece] | None  # for steps whose tokens have adapters; None: there are none


class Crossings:
    """The tensors that graphs and attention share, each as large as the largest size wants it; by place and
    shape."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.tensors: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}

    def like(self, index: str, x: Tensor, size: int) -> Tensor:
        """[size, ...]: for what has the rows, the type and the device of `x`. Zeros at first: padding must be
        numbers."""
        key = (index, x.shape[1:], x.dtype)
        if key not in self.tensors:
            self.tensors[key] = torch.zeros(self.largest, *x.shape[1:], dtype=x.dtype, device=x.device)
        return self.tensors[key][:size]


class Walk:
    """One way through a model. Each `advance` computes a piece, up to the next attention or the end."""

    def __init__(self, pieces: Pieces, size: int, one: ForwardBatch, crossings: Crossings) -> None:
        """`pieces`: of a step of `size` rows of padding; `one`: one of them with an attention plan."""
        self.pieces = pieces
        self.size = size
        self.one = one
        self.crossings = crossings
        self.asked: tuple[TokenMixer, tuple[Tensor, ...]] | None = None  # who attends next, and with what
        self.found: Tensor | None = None  # by the attention before
        self.hidden: Tensor | None = None  # at the end

    def advance(self) -> None:
        """Computes the next piece, up to an attention or to the end."""
        if getgeneratorstate(self.pieces) == GEN_CLOSED:  # a capture is tried again that had failed half way
            raise torch.OutOfMemoryError("no memory for a piece of a step")
        try:
            layer, queries = self.pieces.send(self.found)
        except StopIteration as end:
            self.hidden = self.keep("hidden", end.value)
        else:
            self.asked = layer, tuple(self.keep(f"query {i}", query) for i, query in enumerate(queries))

    def keep(self, index: str, x: Tensor) -> Tensor:
        """A copy of `x` in the shared tensor of that name."""
        kept = self.crossings.like(index, x, self.size)
        kept.copy_(x)
        return kept

    def attend(self) -> Cut:
        """Between two pieces, outside of graphs. What attention's results look like is learned by a single
        token."""
        assert self.asked is not None
        layer, queries = self.asked
        self.found = self.crossings.like(
            "attended", layer.attend(tuple(query[:1] for query in queries), self.one), self.size
        )
        return Cut(layer, queries, self.found)


class PiecewiseGraphs:
    """The graphs of a rank, and the static tensors that they read and write."""

    def __init__(
        self,
        device: Device,
        graphs: Graphs,
        model: PiecewiseModel,
        slots: Slots,
        kv: list[tuple[Tensor, ...]],
        page_size: int,
        windows: tuple[int, ...],
        sizes: Sequence[int],
        *,
        masks: bool,
        compiled: CompiledLayer | None = None,
        states: RecurrentStates | None = None,
        given: tuple[int, torch.dtype] | None = None,
        adapters: LoraAdapters | None = None,
        offload: LayerOffload | None = None,
    ) -> None:
        """`sizes`: numbers of tokens, all that may be captured; `masks`: layers must know which rows are
        padding; `compiled`: computes what follows each attention, None: the layers do;
        `states`: of recurrent layers; `given`: size and type of the hidden states of the stage before; None:
        this is the first one; `adapters`: None without LoRA; `offload`: None: all weights are on the
        device."""
        self.device = device
        self.graphs = graphs
        self.model = model
        self.slots = slots
        self.kv = kv
        self.page_size = page_size
        self.windows = windows
        self.padding_slot = torch.tensor([slots.padding], device=device.torch_device)
        self.recorded: dict[int, Recorded] = {}
        self.ready: list[int] = []  # the sizes in it, rising
        self.crossings = Crossings(max(sizes))
        # tokens, positions, and where keys and values go in each pool of pages
        num_inputs = 2 + (len(slots.page_tables) if kv else 0)
        self.inputs = torch.zeros(num_inputs, max(sizes), dtype=torch.int64, device=device.torch_device)
        self.compiled = compiled
        self.states = states
        # int64 [sizes], and [sizes, hidden]: hidden states of the stage before, and where they stand
        self.given: tuple[Tensor, Tensor] | None = None
        if given is not None:
            hidden = torch.zeros(max(sizes), given[0], dtype=given[1], device=device.torch_device)
            self.given = torch.arange(max(sizes), device=device.torch_device), hidden
        self.adapters = adapters
        self.lora_slots = torch.full((max(sizes),), -1, device=device.torch_device)  # of tokens; -1: none
        self.offload = offload
        self.is_real = (
            torch.zeros(max(sizes), dtype=torch.bool, device=device.torch_device) if masks else None
        )

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────

    def size_for(self, batch: ForwardBatch) -> int | None:
        """The size whose graphs compute this step; None: it must be launched kernel by kernel."""
        count = len(batch.positions)
        at = bisect_left(self.ready, count)
        if at == len(self.ready) or (batch.embeds is not None and self.given is None):
            return None
        size = self.ready[at]
        return size if size <= max(FEW, count + count // 4) else None

    def forward(self, size: int, batch: ForwardBatch, lora_slots: np.ndarray | None = None) -> Tensor:
        """Hidden states of the step's tokens, which the next step overwrites. `lora_slots`: int32 [T], -1 for
        tokens without an adapter; None: no token has one."""
        count = len(batch.positions)
        self.inputs[:, :count] = torch.stack((batch.token_ids, batch.positions, *batch.locations))
        self.inputs[2:, count:size] = 0  # on the padding page; tokens and positions may be any
        if self.given is not None and batch.embeds is not None:
            self.given[1][:count] = batch.embeds[1]
        if self.is_real is not None:
            self.is_real[:count] = True
            self.is_real[count:size] = False
        recorded = self.recorded[size].plain
        if lora_slots is not None:
            adapted = self.recorded[size].adapted
            assert adapted is not None, "a step with adapters where there are none"
            self.lora_slots[:count] = upload_int64(lora_slots, self.device.torch_device)
            self.lora_slots[count:size] = -1
            recorded = adapted
        for piece, cut in zip(recorded.pieces, recorded.cuts, strict=False):
            self.replay(piece)
            cut.attended[:count].copy_(cut.layer.attend(tuple(query[:count] for query in cut.queries), batch))
        self.replay(recorded.pieces[-1])
        return recorded.hidden[:count]

    def replay(self, piece: Piece) -> None:
        """Launches a piece between the copies of its weights."""
        if self.offload is not None:
            self.offload.before(piece.layers)
        self.graphs.replay(piece.graph, ())
        if self.offload is not None:
            self.offload.behind(piece.layers)

    # ── captures ──────────────────────────────────────────────────────────────────────────────────────────

    def capture(self, size: int) -> Captured:
        """Graphs of one more size. One that cannot be captured leaves everything as it was."""
        captured, recorded = attempt(self.device, Capture(size, "tokens"), self.record)
        if recorded is not None:
            self.recorded[size] = recorded
            self.ready = sorted(self.recorded)
        return captured

    def record(self, size: int) -> Recorded:
        """Every piece runs once before any is captured: what allocates or compiles at its first call has done
        so. All passes run before the first capture, as CapturedForward.record says."""
        self.inputs.zero_()
        self.lora_slots.fill_(-1)
        if self.is_real is not None:
            self.is_real.zero_()
        passes = (False,) if self.adapters is None else (False, True)
        for is_adapted in passes:
            self.walk(size, lambda piece: piece(), is_adapted=is_adapted)
        plain, *adapted = [self.captured(size, is_adapted=is_adapted) for is_adapted in passes]
        return Recorded(plain, adapted[0] if adapted else None)

    def captured(self, size: int, *, is_adapted: bool) -> Pass[Piece]:
        """The graphs of one pass."""
        try:
            return self.walk(size, self.capture_piece, is_adapted=is_adapted)
        except torch.OutOfMemoryError:  # the device has given back what lay about
            return self.walk(size, self.capture_piece, is_adapted=is_adapted)

    def capture_piece(self, body: Callable[[], None]) -> Piece:
        """A piece as a graph."""
        if self.offload is None:
            return Piece(self.graphs.capture(body), PieceLayers())
        layers: list[PieceLayers] = []
        offload = self.offload

        def recorded() -> None:  # a device may try a body twice
            with offload.recorded() as found:
                body()
            layers.append(found)

        graph = self.graphs.capture(recorded)
        return Piece(graph, layers[-1])

    def walk(
        self, size: int, take: Callable[[Callable[[], None]], T], *, is_adapted: bool = False
    ) -> Pass[T]:
        """Hands each piece of a step of padding to `take`. `is_adapted`: layers add what adapters add."""
        rows = self.inputs[:, :size]
        one = np.ones(1, np.int32)
        padding = AttentionRows(0, one * self.slots.padding, 0 * one, one)
        single = ForwardBatch(
            rows[0, :1],
            rows[1, :1],
            tuple(rows[2:, :1].unbind()),
            self.kv,
            self.device.ops.plan_attention(padding, self.slots.page_tables, self.page_size, self.windows),
            states=None if self.states is None else self.states.captured_rows(self.padding_slot),
        )
        is_real = None if self.is_real is None else self.is_real[:size]
        embeds = None if self.given is None else (self.given[0][:size], self.given[1][:size])
        locations = tuple(rows[2:].unbind())
        batch = ForwardBatch(rows[0], rows[1], locations, self.kv, None, embeds=embeds, is_real=is_real)
        way = Walk(self.model.piecewise(batch, self.compiled), size, single, self.crossings)

        def first() -> None:
            if self.adapters is not None:
                self.adapters.use_tokens(self.lora_slots[:size] if is_adapted else None)
            way.advance()

        pieces, cuts = [take(first)], []
        while way.hidden is None:
            cuts.append(way.attend())
            pieces.append(take(way.advance))
        return Pass(pieces, cuts, way.hidden)
