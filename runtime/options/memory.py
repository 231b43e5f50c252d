"""The pages that hold keys and values."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta

from runtime.options.declare import Auto, Count, Fraction, Group, Whole, on_device, option, planned

GroupSize = A[int, Meta(ge=-1)]  # -1: no layer-wise offload


class Memory(Group, frozen=True, kw_only=True):
    """Memory and cache"""

    mem_fraction_static: A[Fraction | Auto, option("Part of the device's free memory for weights and cache pages together.")] = "auto"
    max_total_tokens: A[Count | Auto, option("Tokens that the cache pages hold; auto is as many as --mem-fraction-static allows.")] = "auto"
    page_size: A[Count | Auto, option(
        "Tokens in one page of the cache.",
        note="auto is 16 on CPU, where the reference has 1: whole pages gather faster, and a prefix hit loses 15 tokens at most")] = "auto"
    disable_radix_cache: A[bool, option("Don't keep the pages of finished requests for prompts that begin the same.")] = False
    radix_eviction_policy: A[Literal["lru", "lfu"], option(
        "Which cached pages go first when room is needed: the least recently used, or the least often found again.")] = "lru"
    isolate_tenants: A[bool, option("Don't share cached prefixes between tenants (what makes a tenant: --fair-share).")] = False
    swa_full_tokens_ratio: A[Fraction, option(
        "Tokens that the cache of sliding-window layers holds, for each token of full layers.",
        note="models all of whose layers slide have no other cache, and give it all the memory")] = 0.8
    disable_hybrid_swa_memory: A[bool, option(
        "Sliding-window layers keep all tokens, like full ones, and share their pages.")] = False
    disable_chunked_prefix_cache: A[bool, on_device("cuda", "Don't attend to long cached prefixes in chunks (MLA).")] = False
    cpu_offload_gb: A[Whole, planned("Gigabytes of weights that stay in host memory.")] = 0
    offload_group_size: A[GroupSize, planned("Layers in one group of the layer-wise offload.")] = -1
    offload_num_in_group: A[Count, planned("Layers of each group whose weights stay in host memory.")] = 1
    offload_prefetch_step: A[Count, planned("Layers that offloaded weights are fetched ahead.")] = 1
    offload_mode: A[str, planned("Where offloaded weights lie.")] = "cpu"
