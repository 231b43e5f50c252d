"""Adapters on a rank: what each linear layer adds for the tokens of sequences that have one.

Loaded adapters are in host memory, this rank's share of them, cut as the layers are: a column layer's B by
its outputs, a row layer's A by its inputs (whose partial products the layer's sum adds up, as B is linear).
`num_lora_slots` of them sit on the device, side by side in one tensor a layer, with ranks padded to the
largest. A token of the plain model costs nothing, and a step in which nobody has an adapter is as without.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear

from runtime.devices.base import Device
from runtime.devices.lora import AdapterOps, LoraWeights
from runtime.layers.linear import Linear
from runtime.layers.upload import to_device
from runtime.layers.weight import Layer
from runtime.messages.lora import AdapterSetup, LoraAssignment
from runtime.messages.steps import StepPlan
from runtime.models.config import ModelConfig
from runtime.models.lora_targets import linears
from runtime.models.peft import WEIGHTS, Pair, read_adapter

# of an adapter: A [rank, in], B [out, rank] of this rank, by layer and part
Shares = dict[tuple[str, str], tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Current:
    """What the step that is launched needs: what AdapterOps made of it; None: nobody has an adapter."""

    plan: Any = None


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of a step whose adapter sits at `lora_slot`: a slice where they follow one another, else
    int64 [n]."""

    lora_slot: int
    rows: Tensor | slice


class PlainAdapters:
    """AdapterOps on any device: the specification of those that have kernels for it."""

    def __init__(self, torch_device: torch.device, num_lora_slots: int) -> None:
        self.torch_device = torch_device
        self.num_lora_slots = num_lora_slots

    def plan(self, lora_slots: np.ndarray) -> list[Segment]:
        """Two small products for each seat that somebody uses, and part."""
        found: list[Segment] = []
        for lora_slot in np.unique(lora_slots[lora_slots >= 0]).tolist():
            rows = np.flatnonzero(lora_slots == lora_slot)
            is_run = rows[-1] - rows[0] + 1 == len(rows)
            found.append(
                Segment(
                    lora_slot,
                    slice(int(rows[0]), int(rows[-1]) + 1) if is_run else to_device(rows, self.torch_device),
                )
            )
        return found

    def plan_rows(self, lora_slots: Tensor) -> Tensor:
        """bool [T, seats]: who has which. All tokens go through all seats, as nobody knows who is there; that
        costs reading them once."""
        return lora_slots.unsqueeze(1) == torch.arange(self.num_lora_slots, device=lora_slots.device)

    def add(self, out: Tensor, x: Tensor, weights: LoraWeights, plan: list[Segment] | Tensor) -> None:
        if isinstance(plan, Tensor):
            return self._add_all(out, x, weights, plan)
        for segment in plan:
            lora_slot, rows, first = segment.lora_slot, segment.rows, 0
            # [n, parts, rank]
            inner = linear(x[rows], weights.a[lora_slot].flatten(0, 1)).unflatten(1, weights.a.shape[1:3])
            for index, (offset, size) in enumerate(weights.parts):
                columns, added = (
                    out.narrow(1, offset, size),
                    linear(inner[:, index], weights.b[lora_slot, first : first + size]),
                )
                first += size
                if isinstance(rows, slice):
                    columns[rows] += added
                else:
                    columns.index_add_(0, rows, added)
        return None

    def _add_all(self, out: Tensor, x: Tensor, weights: LoraWeights, has: Tensor) -> None:
        """The seats side by side are one adapter of a large rank, of which a token has one part."""
        # [T, seats, parts, rank]
        inner = linear(x, weights.a.flatten(0, 2)).unflatten(1, weights.a.shape[:3])
        inner, first = torch.where(has[:, :, None, None], inner, torch.zeros_like(inner)), 0
        for index, (offset, size) in enumerate(weights.parts):
            b = weights.b[:, first : first + size].transpose(0, 1).flatten(1)
            out.narrow(1, offset, size).add_(linear(inner[:, :, index].flatten(1), b))
            first += size


class LoraSlots:
    """The seats of one linear layer; `parts` where it is fused. They outlive the layer's weights."""

    def __init__(
        self,
        layer: Linear,
        parts: tuple[str, ...],
        setup: AdapterSetup,
        ops: AdapterOps,
        current: Current,
        torch_device: torch.device,
    ) -> None:
        dtype = layer.dtype
        self.ops = ops
        self.current = current
        self.parts = parts
        self.dtype, self.inputs, self.outputs = layer.dtype, layer.inputs, layer.outputs
        sizes = [layer.outputs[part].size for part in parts]
        starts = np.cumsum([0, *(share.size for share in layer.outputs.values())]).tolist()
        offsets = dict(zip(layer.outputs, starts, strict=False))
        self.firsts = np.cumsum([0, *sizes]).tolist()  # columns of B
        self.weights = LoraWeights(
            torch.zeros(
                setup.num_lora_slots,
                len(parts),
                setup.max_rank,
                layer.inputs.size,
                dtype=dtype,
                device=torch_device,
            ),
            torch.zeros(setup.num_lora_slots, sum(sizes), setup.max_rank, dtype=dtype, device=torch_device),
            tuple((offsets[part], size) for part, size in zip(parts, sizes, strict=True)),
        )

    @property
    def num_bytes(self) -> int:
        return self.weights.a.nbytes + self.weights.b.nbytes

    def cut(self, part: str, a: Any, b: Any, scale: float) -> tuple[Tensor, Tensor]:
        """This rank's share of a pair of safetensors' slices; B with the scale in it."""
        inputs, outputs = self.inputs, self.outputs[part]
        mine = (
            a[:, inputs.start : inputs.start + inputs.size],
            b[outputs.start : outputs.start + outputs.size],
        )
        return mine[0].to(self.dtype).contiguous(), (mine[1].float() * scale).to(self.dtype)

    def sit(self, lora_slot: int, path: str, shares: Shares) -> None:
        a, b = self.weights.a[lora_slot].zero_(), self.weights.b[lora_slot].zero_()
        for index, part in enumerate(self.parts):
            if (pair := shares.get((path, part))) is not None:
                rank = len(pair[0])
                a[index, :rank].copy_(pair[0])
                b[self.firsts[index] : self.firsts[index + 1], :rank].copy_(pair[1])

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Adds to what the layer made of `x`, in place."""
        if self.current.plan is not None:
            self.ops.add(out, x, self.weights, self.current.plan)
        return out


class Adapters:
    """All of them on one rank."""

    def __init__(
        self, device: Device, model: Any, config: ModelConfig, setup: AdapterSetup, max_slots: int
    ) -> None:
        self.ops = device.adapters or PlainAdapters(device.torch_device, setup.num_lora_slots)
        self.torch_device = device.torch_device
        self.current = Current()
        self.modules = {
            name: sizes for name, sizes in linears(config).items() if name.rpartition(".")[2] in setup.targets
        }
        self.homes = {name: _home(name, model.fused) for name in self.modules}
        self.lora_slots = {
            path: LoraSlots(layer, parts, setup, self.ops, self.current, device.torch_device)
            for path, layer in _linears(model)
            if (parts := self._parts(path))
        }
        self.attach(model)
        self.hosts: dict[int, Shares] = {}  # by adapter
        self.lora_slot_of_slot = np.full(max_slots, -1, dtype=np.int64)
        # the same on the device; the last slot is nobody's
        self.lora_slots_there = torch.full((max_slots + 1,), -1, device=device.torch_device)

    def _parts(self, path: str) -> tuple[str, ...]:
        return tuple(part for home, part in self.homes.values() if home == path)

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        return sum(lora_slots.num_bytes for lora_slots in self.lora_slots.values())

    def attach(self, model: Any) -> None:
        """The layers of `model`, which is built like the one before, add what adapters add."""
        for path, layer in _linears(model):
            if path in self.lora_slots:
                layer.adapted = self.lora_slots[path].add

    def load(self, id: int, folder: str) -> None:
        """Reads an adapter to host memory; in any thread. Raises ModelError."""
        adapter = read_adapter(folder, self.modules)
        with safe_open(Path(folder) / WEIGHTS, framework="pt") as file:
            self.hosts[id] = {
                self.homes[name]: self._cut(file, name, pair) for name, pair in adapter.pairs.items()
            }

    def _cut(self, file: Any, name: str, pair: Pair) -> tuple[Tensor, Tensor]:
        path, part = self.homes[name]
        return self.lora_slots[path].cut(part, file.get_slice(pair.a), file.get_slice(pair.b), pair.scale)

    def begin(self, plan: StepPlan) -> bool:
        """Called before a step is launched. -> whether somebody in it has an adapter"""
        if plan.lora_assignment is not None:
            self._seat(plan.lora_assignment)
        if plan.admits:
            slots = np.array([admit.slot for admit in plan.admits])
            self.lora_slot_of_slot[slots] = [admit.lora_slot for admit in plan.admits]
            self.lora_slots_there[to_device(slots, self.torch_device)] = to_device(
                self.lora_slot_of_slot[slots], self.torch_device
            )
        return bool((self.lora_slot_of_slot[plan.slots] >= 0).any())

    def of_plan(self, plan: StepPlan, *, is_adapted: bool) -> None:
        """Layers add what the tokens of this plan want, if they want anything."""
        self.current.plan = (
            self.ops.plan(np.repeat(self.lora_slot_of_slot[plan.slots], plan.counts)) if is_adapted else None
        )

    def of_slots(self, slots: Tensor | None) -> None:
        """In a body that is captured: what the rows of `slots`, int64 [R], want when it is replayed; or
        nothing."""
        self.current.plan = None if slots is None else self.ops.plan_rows(self.lora_slots_there[slots])

    def _seat(self, lora_assignment: LoraAssignment) -> None:
        for lora_slot, id in zip(
            lora_assignment.lora_slots.tolist(), lora_assignment.ids.tolist(), strict=True
        ):
            for path, lora_slots in self.lora_slots.items():
                lora_slots.sit(lora_slot, path, self.hosts[id])
        for id in lora_assignment.gone.tolist():
            self.hosts.pop(id, None)


def _home(name: str, fused: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """`layers.0.self_attn.q_proj` -> (`layers.0.self_attn.qkv_proj`, `q`)."""
    parent, _, module = name.rpartition(".")
    module, part = fused.get(module, (module, ""))
    return f"{parent}.{module}", part


def _linears(layer: Layer, prefix: str = "") -> Iterator[tuple[str, Linear]]:
    for name, child in layer.children():
        if isinstance(child, Linear):
            yield prefix + name, child
        elif isinstance(child, Layer):
            yield from _linears(child, f"{prefix}{name}.")
