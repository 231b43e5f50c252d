"""Adapters on the card: two launches for a linear layer, whatever adapters its rows have. Nothing is read by
the host, so such steps can be captured."""

import numpy as np
import torch
import triton
from torch import Tensor

from runtime.devices.cuda.kernels.launch import Card, dot_type, power
from runtime.devices.cuda.kernels.lora import expand, shrink
from runtime.devices.cuda.kernels.moe_permute import Tiles, spread
from runtime.devices.lora import LoraWeights
from runtime.layers.upload import upload

COLUMNS = 64  # of a program that expands
MOST_ROWS = 64  # of a tile
SPLIT_ROWS = 256  # rows of a step up to which inputs are split, so that few rows fill the card
SPLIT_INPUTS = 512  # that a split has at least


class CudaAdapters:
    """See devices/lora.py for what each one means."""

    def __init__(self, card: Card, torch_device: torch.device, num_lora_slots: int) -> None:
        self.card = card
        self.torch_device = torch_device
        self.num_lora_slots = num_lora_slots
        self.pieces: dict[tuple[tuple[int, int], ...], Tensor] = {}  # by LoraWeights.parts

    def plan(self, lora_slots: np.ndarray) -> Tiles:
        return self.plan_rows(upload(lora_slots.astype(np.int64), self.torch_device))

    def plan_rows(self, lora_slots: Tensor) -> Tiles:
        return spread(
            lora_slots.unsqueeze(1),
            self.num_lora_slots,
            min(MOST_ROWS, power(triton.cdiv(len(lora_slots), self.num_lora_slots), 16)),
        )

    def add(self, out: Tensor, x: Tensor, weights: LoraWeights, plan: Tiles) -> None:
        num_rows, ins = x.shape
        rank, width = weights.a.shape[2], weights.a.shape[1] * weights.a.shape[2]
        splits = max(1, min(16, ins // SPLIT_INPUTS)) if num_rows <= SPLIT_ROWS else 1
        inner = x.new_empty(splits, num_rows, width, dtype=torch.float32)
        pieces, columns = self._pieces(weights.parts), min(power(width, 16), COLUMNS)
        x = x if x.stride(1) == 1 else x.contiguous()
        shrink[(len(plan.owners), triton.cdiv(width, columns), splits)](
            inner,
            x,
            weights.a,
            plan.slots,
            plan.owners,
            num_rows,
            ins,
            width,
            x.stride(0),
            SPLITS=splits,
            M=plan.size,
            N=columns,
            K=64,
            DOT=dot_type(x.dtype),
            num_warps=4,
            num_stages=3,
        )
        expand[(len(plan.owners), len(pieces))](
            out,
            inner,
            weights.b,
            pieces,
            plan.slots,
            plan.owners,
            num_rows,
            weights.b.shape[1],
            width,
            out.stride(0),
            RANK=rank,
            SPLITS=splits,
            M=plan.size,
            N=COLUMNS,
            K=power(rank, 16),
            DOT=dot_type(x.dtype),
            num_warps=4,
        )

    def _pieces(self, parts: tuple[tuple[int, int], ...]) -> Tensor:
        """Made at the first call, which no capture is."""
        if parts not in self.pieces:
            found, first = [], 0
            for index, (offset, size) in enumerate(parts):
                found += [
                    (index, first + at, offset + at, min(COLUMNS, size - at))
                    for at in range(0, size, COLUMNS)
                ]
                first += size
            self.pieces[parts] = upload(np.array(found, np.int32), self.torch_device)
        return self.pieces[parts]
