"""Memory of one GPU, by what its driver reports as free."""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.devices.base import PageCopier
from runtime.devices.cgroup import available_bytes
from runtime.devices.cuda.page_copies import CudaPageCopier, lock
from runtime.devices.host_memory import HostPages


class CudaMemory:
    """Memory of this rank's GPU, which it shares with no other rank; host memory is shared by
    `num_ranks`."""

    def __init__(self, num_ranks: int, torch_device: torch.device) -> None:
        self.num_ranks = num_ranks
        self.torch_device = torch_device

    def free_bytes(self) -> int:
        """Bytes that the driver reports as free."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def used_bytes(self) -> int:
        """Bytes that torch's allocator holds."""
        return int(torch.cuda.memory_reserved(self.torch_device))

    def prepare_loading(self) -> None:
        """Nothing to do: the allocator can free weights."""

    def empty_cache(self) -> None:
        """Frees what the allocator caches."""
        torch.cuda.empty_cache()

    def measure_peak(self, run: Callable[[], None]) -> int:
        """The most bytes that `run` takes, with what the allocator takes beyond what is asked of it."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_reserved(self.torch_device)
        run()
        torch.cuda.synchronize(self.torch_device)
        peak = torch.cuda.max_memory_reserved(self.torch_device) - before
        torch.cuda.empty_cache()
        return peak

    def allocate_cache(self, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        """Zeros [num_tokens, num_heads, head_dim]."""
        return torch.zeros(num_tokens, num_heads, head_dim, dtype=dtype, device=self.torch_device)

    def allocate_states(self, num_states: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros [num_states, *shape]."""
        return torch.zeros(num_states, *shape, dtype=dtype, device=self.torch_device)

    def free_host_bytes(self, cache_bytes: int) -> int:
        """This rank's share of the available host memory, in bytes."""
        return available_bytes() // self.num_ranks

    def open_page_copier(self, kv: list[tuple[Tensor, ...]], host: HostPages, page_size: int) -> PageCopier:
        """Page-locks the host pages and opens copies to them. Raises StartError."""
        lock(host)
        return CudaPageCopier(kv, host, page_size, torch.cuda)
