"""LoRA adapters on a rank: what each linear layer adds for the tokens of sequences that have an adapter.

Loaded adapters are in host memory (pinned where the device has memory of its own, so that the host waits for
no copy when a step takes one into use), sharded as the layers are: B of a column-parallel layer by its
outputs, A of a row-parallel layer by its inputs (the layer's reduction adds up the partial products, as B is
linear).
The adapters in use are in `num_lora_slots` LoRA slots on the device, in one tensor a layer, with LoRA ranks
padded to the largest. Tokens without an adapter cost nothing, and a step without adapters is the same as on a
server without them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import deserialize
from torch import Tensor
from torch.nn.functional import linear

from runtime.devices.base import Device
from runtime.devices.lora import LoraWeights
from runtime.layers.linear import Given, Linear, LinearUse
from runtime.layers.step_lora import StepLora
from runtime.layers.upload import pinned, upload_int64
from runtime.layers.weight import Layer, LayerTree, PackedModules
from runtime.messages.lora import AdapterSetup, LoraAssignment
from runtime.messages.steps import StepPlan
from runtime.models.config.lora_targets import lora_modules, lora_renames
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.peft import WEIGHTS, Pair, read_adapter

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# this rank's weights of one adapter: A [rank, in] and B [out, rank], by layer and part
AdapterWeights = dict[tuple[str, str], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of a step whose adapter is in LoRA slot `lora_slot`. `rows`: a slice where they are
    contiguous, else int64 [n]."""

    lora_slot: int
    rows: Tensor | slice


class TorchLoraOps:
    """LoraOps in plain torch on any device: the specification of those that have kernels."""

    def __init__(self, torch_device: torch.device, num_lora_slots: int) -> None:
        self.torch_device = torch_device
        self.num_lora_slots = num_lora_slots

    def of_slots(self, num_lora_slots: int) -> "TorchLoraOps":
        """See LoraOps.of_slots."""
        return TorchLoraOps(self.torch_device, num_lora_slots)

    def plan(self, lora_slots: np.ndarray) -> list[Segment]:
        """`lora_slots`: int32 [T], -1 for tokens without an adapter. Each slot in use costs two small matrix
        products for each part of a layer."""
        segments: list[Segment] = []
        for lora_slot in np.unique(lora_slots[lora_slots >= 0]).tolist():
            rows = np.flatnonzero(lora_slots == lora_slot)
            is_run = rows[-1] - rows[0] + 1 == len(rows)
            segments.append(
                Segment(
                    lora_slot,
                    slice(int(rows[0]), int(rows[-1]) + 1)
                    if is_run
                    else upload_int64(rows, self.torch_device),
                )
            )
        return segments

    def plan_rows(self, lora_slots: Tensor) -> Tensor:
        """bool [T, slots]: which tokens have the adapter in which LoRA slot. All tokens go through all slots,
        because the host does not know which are in use; that costs reading them once."""
        return lora_slots.unsqueeze(1) == torch.arange(self.num_lora_slots, device=lora_slots.device)

    def add(self, out: Tensor, x: Tensor, weights: LoraWeights, plan: list[Segment] | Tensor) -> None:
        """See LoraOps.add."""
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
        """All slots together are one adapter of a large rank, of which each token uses one part."""
        # [T, slots, parts, rank]
        inner = linear(x, weights.a.flatten(0, 2)).unflatten(1, weights.a.shape[:3])
        inner, first = torch.where(has[:, :, None, None], inner, torch.zeros_like(inner)), 0
        for index, (offset, size) in enumerate(weights.parts):
            b = weights.b[:, first : first + size].transpose(0, 1).flatten(1)
            out.narrow(1, offset, size).add_(linear(inner[:, :, index].flatten(1), b))
            first += size


class LoraSlots:
    """The LoRA slots of one linear layer, with several `parts` where the layer is fused. They outlive the
    layer's weights."""

    def __init__(
        self,
        layer: Linear,
        given: Given,
        parts: tuple[str, ...],
        max_rank: int,
        step: StepLora,
        torch_device: torch.device,
    ) -> None:
        dtype, num_lora_slots = layer.dtype, step.num_slots(given)
        self.step, self.given, self.ops = step, given, step.ops[given]
        step.kinds.add(given)
        self.dtype, self.inputs = layer.dtype, layer.inputs
        # a part may be several runs of columns, which have the same A
        runs = {part: layer.output_rows(part) for part in parts}
        self.rows = {part: torch.cat([run.rows for run in own]) for part, own in runs.items()}
        columns = [(part, run.first, len(run.rows)) for part, own in runs.items() for run in own]
        self.part_of_run = [part for part, _, _ in columns]
        num_columns = sum(size for _, _, size in columns)
        self.weights = LoraWeights(
            torch.zeros(
                num_lora_slots, len(columns), max_rank, layer.inputs.size, dtype=dtype, device=torch_device
            ),
            torch.zeros(num_lora_slots, num_columns, max_rank, dtype=dtype, device=torch_device),
            tuple((first, size) for _, first, size in columns),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return self.weights.a.nbytes + self.weights.b.nbytes

    def shard(self, part: str, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """This rank's shard of a pair of checkpoint tensors, A [rank, in] and B [out, rank]. B is multiplied
        by the scale."""
        own = a[:, self.inputs.start : self.inputs.start + self.inputs.size]
        return own.to(self.dtype).contiguous(), (b[self.rows[part]].float() * scale).to(self.dtype)

    def load_slot(self, lora_slot: int, path: str, weights_of_adapter: AdapterWeights) -> None:
        """Copies the adapter's weights for the layer `path` to a LoRA slot, in the order of the device's
        work; zeros where it has none."""
        a, b = self.weights.a[lora_slot].zero_(), self.weights.b[lora_slot].zero_()
        for index, part in enumerate(self.part_of_run):
            if (pair := weights_of_adapter.get((path, part))) is not None:
                a[index, : len(pair[0])].copy_(pair[0], non_blocking=True)
        first = 0
        for part, rows in self.rows.items():
            if (pair := weights_of_adapter.get((path, part))) is not None:
                b[first : first + len(rows), : len(pair[0])].copy_(pair[1], non_blocking=True)
            first += len(rows)

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Adds the low-rank products for the input `x` [T, in] to the layer's output `out` [T, out], in
        place, and returns it."""
        if (plan := self.step.plan(self.given)) is not None:
            self.ops.add(out, x, self.weights, plan)
        return out


class LoraAdapters:
    """All adapters and LoRA slots of one rank."""

    def __init__(
        self,
        device: Device,
        model: LayerTree,
        packed_modules: PackedModules,
        config: ModelConfig,
        setup: AdapterSetup,
        max_slots: int,
    ) -> None:
        """`packed_modules`: of the model's class."""
        ops = device.lora_ops or TorchLoraOps(device.torch_device, setup.num_lora_slots)
        self.torch_device = device.torch_device
        streams = device.streams
        # a thread that takes pinned memory must have its device
        self.take_device = None if streams is None else partial(streams.set_device, streams.current_device())
        self.step = StepLora(device, ops, setup.num_lora_slots)
        self.modules = {
            name: sizes
            for name, sizes in lora_modules(config).items()
            if name.rpartition(".")[2] in setup.targets
        }
        self.renames = lora_renames(config)
        self.fused_targets = {name: _fused_target(name, packed_modules) for name in self.modules}
        self.lora_slots = {
            path: LoraSlots(
                layer.linear if isinstance(layer, LinearUse) else layer,
                layer.given,
                parts,
                setup.max_rank,
                self.step,
                device.torch_device,
            )
            for path, layer in _linear_layers(model)
            if (parts := self._parts(path))
        }
        self.attach(model)
        self.host_weights: dict[int, AdapterWeights] = {}  # by adapter
        self.num_left: Counter[int] = Counter()  # by adapter, the groups that need it no longer
        # by attention group; the last slot is the padding slot
        self.lora_slot_of_slot = np.full((self.step.num_groups, max_slots + 1), -1, dtype=np.int64)
        # those of this rank's group on the device
        self.device_lora_slots = torch.full((max_slots + 1,), -1, device=device.torch_device)

    def _parts(self, path: str) -> tuple[str, ...]:
        return tuple(part for target, part in self.fused_targets.values() if target == path)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(lora_slots.num_bytes for lora_slots in self.lora_slots.values())

    def attach(self, model: LayerTree) -> None:
        """Makes the layers of `model` add what adapters add. The model has the same layers as the one that
        this was made for."""
        for path, layer in _linear_layers(model):
            if path in self.lora_slots:
                layer.lora = self.lora_slots[path]

    def load(self, id: int, folder: str) -> None:
        """Reads an adapter to host memory. May run in any thread, at the same time as steps. Raises
        ModelError."""
        if self.take_device is not None:
            self.take_device()
        adapter = read_adapter(folder, self.modules, self.renames)
        tensors = read_tensors(Path(folder) / WEIGHTS)
        self.host_weights[id] = {
            self.fused_targets[name]: self._shard(tensors, name, pair)
            for name, pair in adapter.pairs.items()
            if self.fused_targets[name][0] in self.lora_slots  # else of another stage's layer
        }

    def _shard(self, tensors: dict[str, Tensor], name: str, pair: Pair) -> tuple[Tensor, Tensor]:
        path, part = self.fused_targets[name]
        a, b = self.lora_slots[path].shard(part, tensors[pair.a], tensors[pair.b], pair.scale)
        return pinned(a, self.torch_device), pinned(b, self.torch_device)

    def begin_step(self, plans: Sequence[StepPlan | None]) -> bool:
        """Applies changes of LoRA slots and sequences of the plans of a step, one of each attention group;
        None: it has none. Call it before the step is launched. -> whether a sequence of the step has an
        adapter"""
        is_adapted = False
        for group, plan in enumerate(plans):
            if plan is None:
                continue
            known = self.lora_slot_of_slot[group]
            if plan.lora_assignment is not None:
                self._assign(group, plan.lora_assignment)
            if plan.admits:
                slots = np.array([admit.slot for admit in plan.admits])
                known[slots] = [admit.lora_slot for admit in plan.admits]
                if group == self.step.group:
                    self.device_lora_slots[upload_int64(slots, self.torch_device)] = upload_int64(
                        known[slots], self.torch_device
                    )
            is_adapted = is_adapted or bool((known[plan.slots] >= 0).any())
        return is_adapted

    def use_plans(self, plans: Sequence[StepPlan], first: Sequence[int]) -> np.ndarray:
        """Layers add what the adapters of the tokens of these plans add, one of each attention group.
        `first`: of each group, how many tokens are in the first of two micro-batches; (): there is one batch.
        -> the LoRA slot of each token of this rank's group, int32 [T], -1 for none"""
        lora_slots = [
            np.repeat(known[plan.slots], plan.counts).astype(np.int32)
            for known, plan in zip(self.lora_slot_of_slot, plans, strict=True)
        ]
        self.step.set(lora_slots, first)
        found: np.ndarray = lora_slots[self.step.group]
        return found

    def use_slots(self, slots: Tensor | None) -> None:
        """In a body that is captured: layers add what the adapters of the sequences in `slots`, int64 [R],
        add when it is replayed. None: nothing."""
        self.use_tokens(None if slots is None else self.device_lora_slots[slots])

    def use_tokens(self, lora_slots: Tensor | None) -> None:
        """In a body that is captured: layers add what the adapters of the tokens add, whose LoRA slots are
        int64 [T], -1 for none, when it is replayed. None: nothing."""
        if lora_slots is None:
            self.step.clear()
        else:
            self.step.set_captured(lora_slots)

    def _assign(self, group: int, lora_assignment: LoraAssignment) -> None:
        for lora_slot, id in zip(
            lora_assignment.lora_slots.tolist(), lora_assignment.ids.tolist(), strict=True
        ):
            for path, lora_slots in self.lora_slots.items():
                first = self.step.first_slot(lora_slots.given, group)
                if first is not None:
                    lora_slots.load_slot(first + lora_slot, path, self.host_weights[id])
        for id in lora_assignment.gone.tolist():
            self.num_left[id] += 1
            if self.num_left[id] == self.step.num_groups:  # else another group may still use it
                del self.num_left[id]
                self.host_weights.pop(id, None)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, each in memory of its own. Not by safe_open, of which each tensor that is read
    leaves 60 bytes behind (safetensors 0.8.0): adapters come and go for months."""
    return {
        name: torch.frombuffer(tensor["data"], dtype=DTYPES[tensor["dtype"]]).view(tensor["shape"])
        for name, tensor in deserialize(path.read_bytes())
        if tensor["data"]
    }


def _fused_target(name: str, packed_modules: PackedModules) -> tuple[str, str]:
    """`layers.0.self_attn.q_proj` -> (`layers.0.self_attn.qkv_proj`, `q`)."""
    parent, _, module = name.rpartition(".")
    module, part = packed_modules.get(module, (module, ""))
    return f"{parent}.{module}", part


def _linear_layers(layer: LayerTree, prefix: str = "") -> Iterator[tuple[str, Linear | LinearUse]]:
    for name, child in layer.children():
        if isinstance(child, Linear | LinearUse):
            yield prefix + name, child
        elif isinstance(child, Layer):
            yield from _linear_layers(child, f"{prefix}{name}.")
