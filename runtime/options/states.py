"""Models whose sequences keep a state besides keys and values."""

from typing import Annotated as A
from typing import Literal

from runtime.options.declare import Amount, Count, Group, planned


class States(Group, frozen=True, kw_only=True):
    """State-space and diffusion models"""

    max_mamba_cache_size: A[Count | None, planned("Sequence states that the cache holds.")] = None
    mamba_ssm_dtype: A[Literal["float32", "bfloat16", "float16"] | None, planned("Type of the states.")] = None
    mamba_full_memory_ratio: A[Amount, planned("Memory of states in relation to that of keys and values.")] = 0.9
    mamba_scheduler_strategy: A[Literal["auto", "no_buffer", "extra_buffer"], planned("How states are kept for prefixes.")] = "auto"
    mamba_track_interval: A[Count, planned("Tokens between two kept states.")] = 256
    mamba_backend: A[Literal["triton", "flashinfer"], planned("Kernels of state-space layers.")] = "triton"
    dllm_algorithm: A[str | None, planned("How a diffusion model fills its tokens in.")] = None
    dllm_algorithm_config: A[str | None, planned("YAML file with its settings.")] = None
