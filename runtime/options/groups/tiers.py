"""Cache tiers beyond the device: host memory and storage."""

from typing import Annotated as A
from typing import Literal

from runtime.options.declare import Amount, Derived, Group, Json, Value, Whole, option, superseded


class Tiers(Group, frozen=True, kw_only=True):
    """Cache tiers"""

    enable_hierarchical_cache: A[
        bool, option("Keep evicted pages in host memory, and in storage if there is one.")
    ] = False
    hicache_ratio: A[Amount, option("Host pages for each device page.")] = 2.0
    hicache_size: A[Whole, option("Gigabytes of host pages of each rank; overrides --hicache-ratio.")] = 0
    hicache_write_policy: A[
        Literal["write_back", "write_through", "write_through_selective"],
        option(
            "When pages are copied to the host.",
            note="write_through: when they are computed; write_through_selective: when a second request "
            "uses them; write_back: when they "
            "must leave the device",
        ),
    ] = "write_through"
    hicache_io_backend: A[
        Literal["direct", "kernel", "kernel_ascend"],
        option(
            "What copies pages between host and device.",
            note="kernel_ascend, on an NPU: each page from where it is to where it belongs, many by one call",
            missing="a difference between direct and kernel, which are the way that each device has",
        ),
    ] = "kernel"
    hicache_mem_layout: A[
        Literal["layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head"],
        option(
            "Order of pages and layers in host memory.",
            later=("page_head",),
            note="page_first suits storage: a page is one piece; page_first_direct means the same here; "
            "page_first_kv_split keeps all keys "
            "before all values",
        ),
    ] = "layer_first"
    disable_hicache_numa_detect: A[
        bool,
        superseded("Don't bind host pages to the device's NUMA node.", "host pages are bound to no node."),
    ] = False
    hicache_storage_backend: A[
        Literal["file", "mooncake", "hf3fs", "nixl", "aibrix", "dynamic", "eic", "simm", "lmcache"] | None,
        option(
            "Where pages are kept that outlive the process: in files, in a store, or by a class of yours.",
            note="all but file need a package; `dynamic` loads a class of yours: docs/tiers.md",
        ),
    ] = None
    hicache_storage_prefetch_policy: A[
        Literal["best_effort", "wait_complete", "timeout"],
        option("How long a request waits for its pages from storage."),
    ] = "best_effort"
    hicache_storage_backend_extra_config: A[
        Json | None,
        option(
            "Settings of the storage, as JSON.",
            note="dir, max_bytes, prefetch_threshold and others: docs/tiers.md",
        ),
    ] = None
    enable_lmcache: A[
        bool,
        option(
            "Keep pages in LMCache, behind host memory.",
            note="as --enable-hierarchical-cache --hicache-storage-backend lmcache; needs the package "
            "lmcache: docs/tiers.md",
        ),
    ] = False


# of servers that compute a half of each request
OF_HALVES: dict[str, dict[Value, Derived]] = {
    "enable_hierarchical_cache": {False: Derived(True, "pages move from host memory to host memory")},
    "hicache_mem_layout": {"layer_first": Derived("page_first", "pages move in one piece")},
}

# of servers with LMCache
LMCACHE = "lmcache"
OF_LMCACHE: dict[str, dict[Value, Derived]] = {
    "enable_hierarchical_cache": {False: Derived(True, "LMCache is behind host memory")},
    "hicache_storage_backend": {None: Derived(LMCACHE, "--enable-lmcache")},
    "hicache_storage_prefetch_policy": {
        "best_effort": Derived("timeout", "requests of --enable-lmcache wait for what it has")
    },
}

# words that stand for other values
LAYOUT_ALIASES = {"page_first_direct": Derived("page_first", "a page is one piece in both")}
