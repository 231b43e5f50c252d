"""Device memory of the ranks: parts that can be released and resumed (sleep and wake), weights that can be
updated or offloaded to host memory.

Commands name the state that the ranks should be in, not a change, so that repeating one is harmless and new
ranks can be brought into the same state.
"""

from typing import Literal

from msgspec import Struct

from runtime.errors import StartError

Part = Literal["kv_cache", "weights", "cuda_graph"]
PARTS: tuple[Part, ...] = ("kv_cache", "weights", "cuda_graph")


class ChangeMemory(Struct, frozen=True, array_like=True, tag="change_memory"):
    """Release the named parts and resume the others. No steps are planned while a part is released.
    MemoryReport answers it, from each rank."""

    id: int
    released: tuple[Part, ...]


class UpdateWeights(Struct, frozen=True, array_like=True, tag="update_weights"):
    """Load the weights of another checkpoint of the same model; with `is_trial`, only check whether that is
    possible. MemoryReport answers it, from each rank. A rank ends if the update fails after a successful
    trial."""

    id: int
    model_path: str
    load_format: str
    is_trial: bool


class MemoryReport(Struct, frozen=True, array_like=True, tag="memory_report"):
    """Device memory that a rank uses now."""

    id: int
    rank: int
    released: tuple[Part, ...]
    weights_bytes: int
    pages_bytes: int
    used_bytes: int  # all memory that the rank has taken, as its device reports it
    error: str  # why a part could not be resumed, or weights not updated; empty: no error


class OffloadSpec(Struct, frozen=True, array_like=True):
    """Which layers' weights are offloaded to host memory: enough for `num_bytes`, or the last `per_group` of
    every `group` layers."""

    num_bytes: int  # 0: group and per_group decide
    group: int
    per_group: int
    ahead: int  # offloaded layers that are prefetched before they are needed


class WeightOffload(Struct, frozen=True, array_like=True):
    """Weights in host memory: those of some layers always, and with `has_backup` all of the model's, with
    `has_draft_backup` all of the draft model's, while the device's memory for them is released."""

    offload: OffloadSpec | None = None
    has_backup: bool = False
    has_draft_backup: bool = False


def offloaded_layers(spec: OffloadSpec, sizes: list[int]) -> tuple[int, ...]:
    """Indices of the layers to offload, given each layer's bytes. Raises StartError if that is impossible, or
    saves no memory."""
    if spec.num_bytes:
        if sum(sizes) < spec.num_bytes:
            raise StartError(
                f"--cpu-offload-gb asks for {spec.num_bytes / 2**30:g} GiB of each rank, and its layers have "
                f"{sum(sizes) / 2**30:.2f}; lower it"
            )
        layers: tuple[int, ...] = ()
        # the last layer of each of `count` equal ranges, so that there is time to prefetch it
        while sum(sizes[i] for i in layers) < spec.num_bytes:
            count = len(layers) + 1
            layers = tuple((i + 1) * len(sizes) // count - 1 for i in range(count))
        what = f"--cpu-offload-gb {spec.num_bytes / 2**30:g}"
    else:
        layers = tuple(i for i in range(len(sizes)) if i % spec.group >= spec.group - spec.per_group)
        what = f"--offload-group-size {spec.group} with --offload-num-in-group {spec.per_group}"
    if len(layers) <= spec.ahead + 1:
        raise StartError(
            f"{what} keeps {len(layers)} of {len(sizes)} layers in host memory, and "
            f"--offload-prefetch-step {spec.ahead} "
            f"takes room for {spec.ahead + 1} of them on the device, so nothing is gained; offload "
            "more, or lower "
            "--offload-prefetch-step"
        )
    return layers


def in_order(parts: frozenset[Part] | set[Part]) -> tuple[Part, ...]:
    """The parts in the order of PARTS."""
    return tuple(part for part in PARTS if part in parts)
