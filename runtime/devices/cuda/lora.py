"""LoRA on a GPU: two launches for a linear layer, whatever adapters its rows have. The host reads nothing, so
such steps can be captured."""

import numpy as np
import torch
import triton
from torch import Tensor

from runtime.devices.cuda.kernels.launch import Gpu, dot_type, next_power_of_2
from runtime.devices.cuda.kernels.lora import expand_kernel, shrink_kernel
from runtime.devices.cuda.kernels.moe_permute import ExpertTiles, moe_align_block_size
from runtime.devices.lora import LoraWeights
from runtime.layers.upload import upload
from runtime.messages.lora import AdapterSetup

COLUMNS = 64  # of a program of expand_kernel
MAX_TILE_ROWS = 64
SPLIT_ROWS = 256  # the most rows of a step whose inputs are split, so that few rows fill the GPU
SPLIT_INPUTS = 512  # the fewest inputs of a split


class CudaLoraOps:
    """LoraOps (devices/lora.py) in Triton."""

    def __init__(self, gpu: Gpu, torch_device: torch.device, num_lora_slots: int) -> None:
        self.gpu = gpu
        self.torch_device = torch_device
        self.num_lora_slots = num_lora_slots
        self.column_blocks: dict[tuple[tuple[int, int], ...], Tensor] = {}  # LoraWeights.parts -> blocks

    def of_slots(self, num_lora_slots: int) -> "CudaLoraOps":
        """See LoraOps.of_slots."""
        return CudaLoraOps(self.gpu, self.torch_device, num_lora_slots)

    def plan(self, lora_slots: np.ndarray) -> ExpertTiles:
        """Tiles of rows by LoRA slot; int32 [T], -1: no adapter."""
        return self.plan_rows(upload(lora_slots.astype(np.int64), self.torch_device))

    def plan_rows(self, lora_slots: Tensor) -> ExpertTiles:
        """The LoRA plan of a step, from the LoRA slot of each token on the device, int64 [T]."""
        return moe_align_block_size(
            lora_slots.unsqueeze(1),
            self.num_lora_slots,
            min(MAX_TILE_ROWS, next_power_of_2(triton.cdiv(len(lora_slots), self.num_lora_slots), 16)),
        )

    def add(self, out: Tensor, x: Tensor, weights: LoraWeights, plan: ExpertTiles) -> None:
        """Adds the adapters' products to out [T, O]; see LoraOps.add."""
        num_rows, ins = x.shape
        rank, width = weights.a.shape[2], weights.a.shape[1] * weights.a.shape[2]
        splits = max(1, min(16, ins // SPLIT_INPUTS)) if num_rows <= SPLIT_ROWS else 1
        inner = x.new_empty(splits, num_rows, width, dtype=torch.float32)
        column_blocks, columns = self._column_blocks(weights.parts), min(next_power_of_2(width, 16), COLUMNS)
        x = x if x.stride(1) == 1 else x.contiguous()
        shrink_kernel[(len(plan.expert_ids), triton.cdiv(width, columns), splits)](
            inner,
            x,
            weights.a,
            plan.slots,
            plan.expert_ids,
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
        expand_kernel[(len(plan.expert_ids), len(column_blocks))](
            out,
            inner,
            weights.b,
            column_blocks,
            plan.slots,
            plan.expert_ids,
            num_rows,
            weights.b.shape[1],
            width,
            out.stride(0),
            RANK=rank,
            SPLITS=splits,
            M=plan.size,
            N=COLUMNS,
            K=next_power_of_2(rank, 16),
            DOT=dot_type(x.dtype),
            num_warps=4,
        )

    def _column_blocks(self, parts: tuple[tuple[int, int], ...]) -> Tensor:
        """int32 [blocks, 4]: part, first column in b, first column in the output, number of columns. Made at
        the first call, which is never captured."""
        if parts not in self.column_blocks:
            blocks, first = [], 0
            for index, (offset, size) in enumerate(parts):
                blocks += [
                    (index, first + at, offset + at, min(COLUMNS, size - at))
                    for at in range(0, size, COLUMNS)
                ]
                first += size
            self.column_blocks[parts] = upload(np.array(blocks, np.int32), self.torch_device)
        return self.column_blocks[parts]


def open_lora_ops(setup: AdapterSetup | None, gpu: Gpu, torch_device: torch.device) -> CudaLoraOps | None:
    """What computes adapters; None: there are none."""
    return None if setup is None else CudaLoraOps(gpu, torch_device, setup.num_lora_slots)
