"""TensorRT-LLM's attention over pages for compute capability 10, from the package flashinfer-python,
written by its source at 0.7.2: `--attention-backend trtllm_mha`, and for decodes of latent attention
`--decode-attention-backend trtllm_mla`.

Kernels read lengths on the device, so captured steps need nothing else. All calls share a workspace, which
is zeros before the first one.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.absorbed import LatentBackend, LatentRows
from runtime.devices.cuda.flash import FlashBackend, FlashRows
from runtime.devices.cuda.kernels.launch import Gpu

WORKSPACE_BYTES = 128 << 20  # for parts of rows
RANK = 512  # of latents
NOPE_DIM = 128  # asked for by name, and not used by these kernels


class Workspace:
    """Memory of all calls of a backend, allocated at the first one."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def on(self, torch_device: torch.device) -> Tensor:
        """Bytes, zeros at first."""
        if self.buffer is None:
            self.buffer = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=torch_device)
        return self.buffer


class TrtllmMhaBackend(FlashBackend):
    """trtllm_batch_decode_with_kv_cache, and trtllm_batch_context_with_kv_cache for prompts."""

    adds_sinks = True

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        workspace = Workspace()

        def flash(
            q: Tensor, keys: Tensor, values: Tensor, rows: FlashRows, scores: Scores, *, wants_lse: bool
        ) -> Tensor:
            assert not scores.cap and not wants_lse
            options = {
                "kv_cache": (keys, values),
                "workspace_buffer": workspace.on(q.device),
                "block_tables": rows.table,
                "seq_lens": rows.lengths,
                "bmm1_scale": scores.scale,
                "bmm2_scale": 1.0,
                "window_left": scores.window - 1 if scores.window else -1,
                "sinks": scores.sinks,
                "kv_layout": "NHD",
                "backend": "trtllm-gen",
            }
            if rows.ends is None:
                found: Tensor = trtllm_batch_decode_with_kv_cache(
                    query=q.squeeze(1).contiguous(), max_seq_len=rows.longest_keys, **options
                )
                return found
            made: Tensor = trtllm_batch_context_with_kv_cache(
                query=q.contiguous(),
                max_q_len=rows.longest,
                max_kv_len=rows.longest_keys,
                batch_size=len(rows.lengths),
                cum_seq_lens_q=rows.ends,
                cum_seq_lens_kv=pad(rows.lengths.cumsum(0, dtype=torch.int32), (1, 0)),
                **options,
            )
            return made

        self.flash = flash


class TrtllmMlaBackend(LatentBackend[None]):
    """trtllm_batch_decode_with_kv_cache_mla: one token for each row."""

    def __init__(self, dtype: torch.dtype, gpu: Gpu) -> None:
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

        workspace = Workspace()

        def absorbed(q: Tensor, pages: Tensor, rows: LatentRows[None], scale: float) -> Tensor:
            found: Tensor = trtllm_batch_decode_with_kv_cache_mla(
                query=q,
                kv_cache=pages,
                workspace_buffer=workspace.on(q.device),
                qk_nope_head_dim=NOPE_DIM,
                kv_lora_rank=RANK,
                qk_rope_head_dim=q.shape[3] - RANK,
                block_tables=rows.table,
                seq_lens=rows.lengths,
                max_seq_len=rows.longest,
                bmm1_scale=scale,
                bmm2_scale=1.0,
                backend="trtllm-gen",
            )
            return found

        self.gpu = gpu
        self.absorbed = absorbed

    def open_schedule(self) -> None:
        """Nothing."""
