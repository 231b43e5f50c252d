"""TensorRT-LLM's decodes of latent attention over pages of latents: `--decode-attention-backend trtllm_mla`,
from the package flashinfer-python, written by its source at 0.7.2.

They are for compute capability 10, in bfloat16, one token for each row, latents of 512 and rotary parts of 64
numbers, pages of 32 or 64 tokens, and up to 64 query heads on a rank, or 128. Lengths are read on the device.
"""

import torch
from torch import Tensor

from runtime.devices.cuda.absorbed import LatentBackend, LatentRows
from runtime.devices.cuda.kernels.launch import Gpu

WORKSPACE_BYTES = 128 << 20  # for parts of rows; zeros before the first call
NOPE_DIM = 128  # asked for by name, and not used by these kernels


class TrtllmMlaBackend(LatentBackend[None]):
    """trtllm_batch_decode_with_kv_cache_mla, which has no schedule of the host's."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

        self.gpu = gpu
        self.workspace: Tensor | None = None

        def absorbed(q: Tensor, pages: Tensor, rows: LatentRows[None], scale: float) -> Tensor:
            rank = 512
            found: Tensor = trtllm_batch_decode_with_kv_cache_mla(
                query=q,
                kv_cache=pages,
                workspace_buffer=self.workspace_buffer(q.device),
                qk_nope_head_dim=NOPE_DIM,
                kv_lora_rank=rank,
                qk_rope_head_dim=q.shape[3] - rank,
                block_tables=rows.table,
                seq_lens=rows.lengths,
                max_seq_len=rows.longest,
                bmm1_scale=scale,
                bmm2_scale=1.0,
                backend="trtllm-gen",
            )
            return found

        self.absorbed = absorbed

    def workspace_buffer(self, torch_device: torch.device) -> Tensor:
        """The workspace of all calls, allocated at the first one."""
        if self.workspace is None:
            self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=torch_device)
        return self.workspace

    def open_schedule(self) -> None:
        """Nothing."""
