"""A device with graphs, in plain memory: the cpu's arithmetic, and captures as tapes of torch's operators.

A replay runs the operators of the capture again on the very tensors of the capture, and nothing of the Python
around them. So what a body read from plans or decided in Python is frozen, as on a real device, and shows as
wrong tokens; what would make the host wait for a device, or bring host data to it, is refused while it is
captured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cpu.moe import CpuExperts
from runtime.devices.cpu.ops import CpuOps
from runtime.devices.facts import ANY_K
from runtime.devices.progress import Progress
from runtime.devices.torch_all_to_all import open_all_to_all
from runtime.layers.attention.sdpa import AttentionPlan, DecodeGroup
from runtime.layers.attention.sdpa import _locations as locations
from runtime.messages.ranks import StartRank
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "pin_memory")
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "unique_consecutive",
    "bincount",
    "is_nonzero",
    "item",
    "equal",
    "repeat_interleave",
)


class Refused(RuntimeError):
    """What a graph cannot hold."""


class NoReads(TorchFunctionMode):
    """Refuses what makes the host wait, or host data travel, at the level of Python calls."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS:
            raise Refused(f"torch's {name} in a captured body")
        return function(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Records operators with the tensors that they had."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        if name in WAITS and not (name == "repeat_interleave" and isinstance(args[1], int)):
            raise Refused(f"the operator {function} in a captured body")
        if name == "lift_fresh" and args[0].numel() > 1:
            raise Refused("host data in a captured body")
        if name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1]):
            raise Refused("an index by a mask in a captured body")
        found = function(*args, **kwargs)
        outs = [x for x in (found if isinstance(found, list | tuple) else [found]) if isinstance(x, Tensor)]
        given = {x.untyped_storage().data_ptr() for x in flat((args, kwargs))}
        if function._schema.is_mutable:
            self.calls.append(lambda: function(*args, **kwargs))
        elif fresh := [x.untyped_storage().data_ptr() not in given for x in outs]:
            if any(fresh) and name != "lift_fresh":
                self.calls.append(lambda: again(function, args, kwargs, outs))
        return found


def flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [x for value in values for x in flat(value)] if isinstance(values, list | tuple) else []


def again(function: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> None:
    """The same arithmetic, into the same memory."""
    found = function(*args, **kwargs)
    for out, value in zip(outs, found if isinstance(found, list | tuple) else [found], strict=True):
        out.copy_(value)


@dataclass(frozen=True)
class GatheredPlan:
    """As CpuAttentionPlan, for steps whose rows only the device knows."""

    gathered: AttentionPlan


class Tapes:
    """Graphs of this device."""

    reads_lengths = True

    def __init__(self) -> None:
        self.recording: list[Tape] = []
        self.lengths: list[np.ndarray] = []  # of all replays that brought some
        self.replays = 0
        self.forgotten = 0
        self.fails_at: int | None = None  # captures from now on until one fails

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> "GatheredPlan":
        """Of tensors alone: every row sees all of its page table through a mask."""
        decodes = {}
        for window in windows:
            table = page_tables[-1 if window else 0]
            gather = locations(table, slots, torch.zeros_like(slots), table.shape[1], page_size)
            positions, ends = torch.arange(gather.shape[1]), lengths.unsqueeze(1)
            is_seen = positions < ends
            if window:
                is_seen = is_seen & (positions >= ends - window)
            mask = torch.zeros(is_seen.shape, dtype=torch.float32).masked_fill_(~is_seen, -torch.inf)
            decodes[window] = [
                DecodeGroup(None, len(slots), torch.where(is_seen, gather, 0).flatten(), mask[:, None, None])
            ]
        return GatheredPlan(AttentionPlan(len(slots), decodes, {window: [] for window in windows}, {}))

    def capture(self, body: Callable[[], None], stream: Any = None) -> Tape:
        tape = Tape()
        self.recording.append(tape)
        with NoReads(), tape:
            body()
        self.recording.pop()
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                self.fails_at = None
                raise torch.OutOfMemoryError("no room for a tape")
        return tape

    def forget(self) -> None:
        self.forgotten += 1

    def replay(self, graph: Tape, lengths: Any) -> None:
        self.replays += 1
        if len(lengths):
            self.lengths.append(lengths)
        for call in graph.calls:
            call()


class TapedRanks:
    """Exchange as one call on the tape, as it is one kernel on a real device."""

    def __init__(self, ranks: Any, tapes: Tapes) -> None:
        self.ranks = ranks
        self.tapes = tapes
        self.rank, self.size = ranks.rank, ranks.size
        self.close = ranks.close

    def __getattr__(self, name: str) -> Any:
        exchange = getattr(self.ranks, name)

        def call(x: Tensor, *rest: Any) -> Tensor:
            if not self.tapes.recording:
                return exchange(x, *rest)
            tape = self.tapes.recording[-1]
            with torch.utils._python_dispatch._disable_current_modes():
                out = exchange(x, *rest)
                tape.calls.append(
                    lambda: out.copy_(exchange(x, *rest)) if out is not x else exchange(x, *rest)
                )
            return out

        return call


class TapedOps(CpuOps):
    """The cpu's ops, with sampling that launches the same work for all sampling params, as graph capture
    needs it."""

    def sample(self, logits: Tensor, draw: Any) -> Tensor:
        vocab = logits.shape[1]
        weights = (
            (logits - logits.amax(1, keepdim=True)) / draw.temperature.clamp_min(1e-30).unsqueeze(1)
        ).exp()
        # without top_k and top_p, in the vocabulary's order
        plain = _draw(weights * (weights >= draw.min_p.unsqueeze(1)), draw.uniform)
        values, ids = weights.double().sort(dim=1, descending=True, stable=True)
        places, top_k = torch.arange(vocab), draw.top_k.unsqueeze(1)
        kept = values * ((places < top_k) | (top_k == 0))
        sums = kept.cumsum(1)
        kept = kept * ((sums - kept < sums[:, -1:] * draw.top_p.double().unsqueeze(1)) | (places == 0))
        cut = ids.gather(
            1, _draw(kept * (values >= draw.min_p.unsqueeze(1)), draw.uniform).unsqueeze(1)
        ).squeeze(1)
        is_cut = ((draw.top_k > 0) & (draw.top_k < vocab)) | (draw.top_p < 1)
        return torch.where(draw.temperature > 0, torch.where(is_cut, cut, plain), logits.argmax(1))


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    sums = weights.cumsum(1, dtype=torch.float64)
    return (
        torch.searchsorted(sums, (uniforms * sums[:, -1]).unsqueeze(1), right=True)
        .squeeze(1)
        .clamp_max(weights.shape[1] - 1)
    )


class TapedExperts(CpuExperts):
    """Every expert over every token: nothing depends on what was chosen but the numbers."""

    def apply(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, packed: Any, first: int | None = None
    ) -> Tensor:
        expert_ids = expert_ids - (first or 0)
        out = torch.zeros(x.shape)
        for expert, (gate_up, down) in enumerate(packed):
            share = (weights * (expert_ids == expert)).sum(1, keepdim=True)
            out += (
                self.ops.linear(self.ops.act_and_mul(self.ops.linear(x, gate_up, None), "silu"), down, None)
                * share
            )
        return out.to(x.dtype)


class TapedDevice:
    """The cpu with graphs that are tapes."""

    def __init__(self, draws: tuple[tuple[int, bool], ...] = ((ANY_K, True),)) -> None:
        self.tapes = Tapes()
        self.facts = structs.replace(
            FACTS, name="taped", dtypes=("float32",), graph_max_running=64, captured_samplers=draws
        )

    def open(self, start: StartRank, rank: int, dtype: torch.dtype) -> Device:
        device, ops = open_device(start, rank, dtype), TapedOps(dtype)
        ranks, attention = TapedRanks(device.collectives, self.tapes), device.attention
        if attention is not None:
            names = ("heads", "parts", "group", "peers")
            attention = replace(
                attention, **{name: TapedRanks(getattr(attention, name), self.tapes) for name in names}
            )
        experts = TapedExperts(ops)
        return replace(
            device,
            facts=self.facts,
            ops=ops,
            experts=experts,
            graphs=self.tapes,
            programs=None,
            fused=None,
            recurrent=None,
            logits_ops=None,
            collectives=ranks,
            attention=attention,
            all_to_all=open_all_to_all(start.moe_a2a_backend, start.deepep_mode, ranks, experts),
        )


class TapedRunner(TorchExecutor):
    """Captures what it is told to as soon as it has started."""

    def __init__(self, rank: int, start: StartRank, progress: Progress, device: TapedDevice) -> None:
        super().__init__(start_torch_rank(rank, start, progress, device.open, device.facts))
        self.tapes = device.tapes
        for size in start.graph_sizes:
            assert self.capture(size).error == ""
        for size in () if self.runner.verifies is None else start.graph_sizes:
            assert self.capture(size, "verifies").error == ""
        for size in start.piecewise_sizes:
            assert self.capture(size, "tokens").error == ""


def open_executor(rank: int, start: StartRank, progress: Progress) -> TapedRunner:
    return TapedRunner(rank, start, progress, TapedDevice())
