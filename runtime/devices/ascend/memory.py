"""Memory of one NPU, by what its driver reports as free."""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.devices.ascend.page_copies import AscendPageCopier
from runtime.devices.cgroup import available_bytes
from runtime.devices.host_memory import HostPages
from runtime.errors import StartError

MAX_NUMBERS = 2**31 - 1  # numbers of one cache that decode attention can address
MAX_WIDTH = 65535  # the most numbers of a token in one cache, K * D
ALIGNED = 16  # head sizes are multiples of this, and of twice as much in int8


class AscendMemory:
    """Memory of this rank's NPU, which it shares with no other rank; host memory is shared by `num_ranks`.
    `is_sparse`: pages are those of sparse latent attention, whose sizes are tried at start (checks.py).
    `batches_copies`: pages go to and from host memory by Batched (page_copies.py)."""

    def __init__(self, num_ranks: int, *, is_sparse: bool = False, batches_copies: bool = False) -> None:
        self.num_ranks = num_ranks
        self.is_sparse = is_sparse
        self.batches_copies = batches_copies

    def free_bytes(self) -> int:
        """Bytes that the driver reports as free."""
        return int(torch.npu.mem_get_info()[0])

    def used_bytes(self) -> int:
        """Bytes that torch_npu's allocator holds."""
        return int(torch.npu.memory_reserved())

    def prepare_loading(self) -> None:
        """Nothing to do: the allocator can free weights."""

    def empty_cache(self) -> None:
        """Frees what the allocator caches."""
        torch.npu.empty_cache()

    def measure_peak(self, run: Callable[[], None]) -> int:
        """The most bytes that `run` takes, with what the allocator takes beyond what is asked of it, and what
        stays taken elsewhere for later steps, such as HCCL's buffers and the operators' workspaces."""
        self.empty_cache()
        torch.npu.reset_peak_memory_stats()
        free_bytes = self.free_bytes()
        before = torch.npu.memory_reserved()
        run()
        torch.npu.synchronize()
        peak = int(torch.npu.max_memory_reserved()) - before
        self.empty_cache()
        return peak + max(0, free_bytes - self.free_bytes())

    def allocate_cache(self, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Zeros [num_tokens, num_heads, head_dim]. Raises StartError for a cache that the attention operator
        cannot read."""
        width, aligned = num_heads * head_dim, ALIGNED * (2 if dtype == torch.int8 else 1)
        if not self.is_sparse and (head_dim % aligned or width > MAX_WIDTH):
            raise StartError(
                f"a rank's {num_heads} key/value heads of size {head_dim} do not fit the attention of npu, "
                "which "
                f"takes multiples of {aligned}, and up to {MAX_WIDTH} numbers together; raise "
                "--tensor-parallel-size, or take another --device"
            )
        if num_tokens * width > MAX_NUMBERS:
            raise StartError(
                f"{num_tokens} tokens of {width} numbers are more than the attention of npu can address in "
                "one "
                f"layer; set --max-total-tokens to {MAX_NUMBERS // width // 1024 * 1024} or less"
            )
        return torch.zeros(num_tokens, num_heads, head_dim, dtype=dtype, device="npu")

    def allocate_states(self, num_states: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros [num_states, *shape]."""
        return torch.zeros(num_states, *shape, dtype=dtype, device="npu")

    def free_host_bytes(self, cache_bytes: int) -> int:
        """This rank's share of the available host memory, in bytes."""
        return available_bytes() // self.num_ranks

    def open_page_copier(
        self, kv: list[tuple[Tensor, ...]], host: HostPages, page_size: int
    ) -> AscendPageCopier:
        """Copies between these caches and host pages. Raises StartError."""
        return AscendPageCopier(kv, host, page_size, is_batched=self.batches_copies)
