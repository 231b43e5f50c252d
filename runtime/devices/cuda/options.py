"""Options that only the cuda device has. Torch-free."""

from msgspec import Struct


class CudaOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """StartRank.device_options of the cuda device."""

    base_gpu_id: int = 0  # card of rank 0
    gpu_id_step: int = 1  # from a rank's card to the next rank's
    cudagraph_gc: bool = False  # Python's garbage collector runs while steps are captured
    symm_mem: bool = False  # small sums over ranks go through memory that the cards share, by torch
    nccl_window: bool = False  # the same, by NCCL
    checks_peers: bool = False  # ranks start only where the cards have access to each other's memory
    fp8_gemm_backend: str = "by_rows"
    prefill_attention_backend: str = "triton"
    decode_attention_backend: str = "triton"
