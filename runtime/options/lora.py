"""Low-rank adapters."""

from typing import Annotated as A
from typing import Literal

from runtime.options.declare import Auto, Count, Group, on_device, planned


class Lora(Group, frozen=True, kw_only=True):
    """LoRA"""

    enable_lora: A[bool | Auto, planned("Serve low-rank adapters beside the model.")] = "auto"
    enable_lora_overlap_loading: A[bool, planned("Copy adapters to the device while steps run.")] = False
    max_lora_rank: A[Count | None, planned("Largest rank of an adapter.")] = None
    lora_target_modules: A[tuple[str, ...] | None, planned("Layers that adapters may change, or all.")] = None
    lora_paths: A[tuple[str, ...] | None, planned("Adapters to load at start: PATH, NAME=PATH, or JSON.")] = None
    max_loras_per_batch: A[Count, planned("Adapters that one step may mix, the plain model included.")] = 8
    max_loaded_loras: A[Count | None, planned("Adapters that host memory holds.")] = None
    lora_eviction_policy: A[Literal["lru", "fifo"], planned("Which adapter goes when the device's room is full.")] = "lru"
    lora_backend: A[Literal["triton", "csgmv", "ascend", "torch_native"], planned("Kernels that compute adapters.")] = "csgmv"
    max_lora_chunk_size: A[Literal[16, 32, 64, 128], on_device("cuda", "Tokens in one chunk of the chunked adapter kernels.")] = 16
