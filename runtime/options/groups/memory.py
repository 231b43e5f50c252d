"""Memory of weights and of the pages that hold keys and values."""

from math import lcm
from typing import Annotated as A
from typing import Literal

from msgspec import Meta

from runtime.devices.facts import DeviceFacts
from runtime.messages.memory import OffloadSpec
from runtime.options.declare import Auto, Count, Derived, Fraction, Group, Whole, on_device, option
from runtime.options.facts import ModelFacts

GroupSize = A[int, Meta(ge=-1)]  # -1: no layer-wise offload


class Memory(Group, frozen=True, kw_only=True):
    """Memory and cache"""

    mem_fraction_static: A[
        Fraction | Auto, option("Part of the device's free memory for weights and cache pages together.")
    ] = "auto"
    max_total_tokens: A[
        Count | Auto,
        option("Tokens that the cache pages hold; auto is as many as --mem-fraction-static allows."),
    ] = "auto"
    page_size: A[
        Count | Auto,
        option(
            "Tokens in one page of the cache.",
            note="auto is 16 on CPU, where the reference has 1: whole pages gather faster, and a prefix hit "
            "loses 15 tokens at most",
        ),
    ] = "auto"
    disable_radix_cache: A[
        bool, option("Don't keep the pages of finished requests for prompts that begin the same.")
    ] = False
    radix_eviction_policy: A[
        Literal["lru", "lfu"],
        option(
            "Which cached pages go first when room is needed: the least recently used, or the least often "
            "found again."
        ),
    ] = "lru"
    isolate_tenants: A[
        bool, option("Don't share cached prefixes between tenants: keys, or names with --fair-share header.")
    ] = False
    swa_full_tokens_ratio: A[
        Fraction,
        option(
            "Tokens that the cache of sliding-window layers holds, for each token of full layers.",
            note="models all of whose layers slide have no other cache, and give it all the memory",
        ),
    ] = 0.8
    disable_hybrid_swa_memory: A[
        bool, option("Sliding-window layers keep all tokens, like full ones, and share their pages.")
    ] = False
    disable_chunked_prefix_cache: A[
        bool, on_device("cuda", "Don't attend to long cached prefixes in chunks (MLA).")
    ] = False
    cpu_offload_gb: A[
        Whole,
        option(
            "Gigabytes (2^30 bytes) of each rank's weights that stay in host memory, and come layer by "
            "layer in each step.",
            note="spread evenly over the layers",
        ),
    ] = 0
    offload_group_size: A[
        GroupSize,
        option(
            "Layers in one group, whose last --offload-num-in-group stay in host memory.",
            note="an alternative to --cpu-offload-gb; -1: no groups",
        ),
    ] = -1
    offload_num_in_group: A[Count, option("Layers of each group whose weights stay in host memory.")] = 1
    offload_prefetch_step: A[
        Count,
        option(
            "Offloaded layers that are fetched before they are needed; each takes room on the device, as "
            "does the one that computes."
        ),
    ] = 1
    offload_mode: A[
        Literal["cpu", "meta", "shm_cpu", "sharded_gpu"],
        option("Where offloaded weights lie.", later=("meta", "shm_cpu", "sharded_gpu")),
    ] = "cpu"


class MemoryPlan(Memory, frozen=True, kw_only=True):
    """Memory and cache settings in force."""

    mem_fraction_static: float
    max_total_tokens: int | None  # None: as many as mem_fraction_static allows
    page_size: int  # tokens

    @property
    def offload(self) -> OffloadSpec | None:
        """Which weights stay in host memory; None: all weights are on the device."""
        if not self.cpu_offload_gb and self.offload_group_size <= 0:
            return None
        return OffloadSpec(
            self.cpu_offload_gb * 2**30,
            self.offload_group_size,
            self.offload_num_in_group,
            self.offload_prefetch_step,
        )

    def pool_notice(self, num_tokens: int) -> str:
        """What became of --max-total-tokens, where the pages hold another number of tokens; else empty."""
        if self.max_total_tokens in (None, num_tokens):
            return ""
        return (
            f"--max-total-tokens {self.max_total_tokens} became {num_tokens}: whole pages, no more than "
            "sequences can use, and what --mem-fraction-static leaves room for"
        )

    @property
    def window_ratio(self) -> float:
        """Cached tokens of sliding-window layers for each cached token of full layers; 0: shared pages."""
        return 0.0 if self.disable_hybrid_swa_memory else self.swa_full_tokens_ratio


def mem_fraction_static(device: DeviceFacts) -> Derived:
    """The fraction of free memory that suits the device."""
    return Derived(device.memory_fraction, device.memory_reason)


def max_total_tokens() -> Derived:
    """None: each rank measures its memory."""
    return Derived(None, "each rank measures its memory and takes what --mem-fraction-static allows")


def page_size(device: DeviceFacts, model: ModelFacts) -> Derived:
    """The page that suits the device's kernels, in tokens, and of a diffusion model holds whole blocks."""
    blocks = 1 if model.diffusion is None else model.diffusion.block_size
    if device.page_size % blocks:
        return Derived(lcm(device.page_size, blocks), f"pages hold whole blocks of {blocks} tokens")
    return Derived(device.page_size, f"it suits the kernels of {device.name}")
