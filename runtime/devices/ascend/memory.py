"""Memory of one NPU: what its driver says is free, and copies between its pages and host memory."""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.devices.ascend.page_copies import AscendPageCopier
from runtime.devices.host_memory import HostPages, available_bytes
from runtime.errors import StartError

MOST_NUMBERS = 2**31 - 1  # in one cache: what the attention of decodes can address
MOST_WIDTH = 65535  # numbers of a token in one cache, K * D
ALIGNED = 16  # head sizes are multiples of it


class AscendMemory:
    """Memory of this rank's NPU, which it shares with no other rank; host memory is shared by `num_ranks`."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def free_bytes(self) -> int:
        return int(torch.npu.mem_get_info()[0])

    def used_bytes(self) -> int:
        return int(torch.npu.memory_reserved())

    def prepare_loading(self) -> None:
        """The NPU's allocator gives back what nobody holds."""

    def empty_cache(self) -> None:
        torch.npu.empty_cache()

    def measure_peak(self, run: Callable[[], None]) -> int:
        """With what the allocator takes beyond what is asked of it; and with what is kept elsewhere for the
        steps to come, such as HCCL's buffers and the operators' workspaces."""
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
        """Raises StartError for what the attention operator cannot read."""
        width = num_heads * head_dim
        if head_dim % ALIGNED or width > MOST_WIDTH:
            raise StartError(
                f"a rank's {num_heads} key/value heads of size {head_dim} do not fit the attention of npu, which takes "
                f"multiples of {ALIGNED}, and up to {MOST_WIDTH} numbers together; raise --tensor-parallel-size, or take "
                "another --device"
            )
        if num_tokens * width > MOST_NUMBERS:
            raise StartError(
                f"{num_tokens} tokens of {width} numbers are more than the attention of npu can address in one layer; set "
                f"--max-total-tokens to {MOST_NUMBERS // width // 1024 * 1024} or less"
            )
        return torch.zeros(num_tokens, num_heads, head_dim, dtype=dtype, device="npu")

    def free_host_bytes(self, cache_bytes: int) -> int:
        return available_bytes() // self.num_ranks

    def open_page_copier(
        self, kv: list[tuple[Tensor, Tensor]], host: HostPages, page_size: int
    ) -> AscendPageCopier:
        return AscendPageCopier(kv, host, page_size)
