"""What ranks hold in device memory: parts that can be released and resumed, weights that can be replaced or
offloaded.

Ranks are told the state to be in and not the change, so to say it twice does no harm, and new ranks can be
told the same.
"""

from typing import Literal

from msgspec import Struct

from runtime.errors import StartError

Part = Literal["kv_cache", "weights", "cuda_graph"]
PARTS: tuple[Part, ...] = ("kv_cache", "weights", "cuda_graph")


class ChangeMemory(Struct, frozen=True, array_like=True, tag="change_memory"):
    """Give back what is named, and take what is not. No steps come while anything is given back. Occupied
    answers it, from each rank."""

    id: int
    released: tuple[Part, ...]


class UpdateWeights(Struct, frozen=True, array_like=True, tag="update_weights"):
    """Take the weights of another checkpoint of the same model; with `is_trial`, only look whether that can
    be done. Occupied answers it, from each rank, unless it cannot be done after a trial said so: then the
    rank ends."""

    id: int
    model_path: str
    load_format: str
    is_trial: bool


class MemoryReport(Struct, frozen=True, array_like=True, tag="memory_report"):
    """What a rank holds now."""

    id: int
    rank: int
    released: tuple[Part, ...]
    weights_bytes: int
    pages_bytes: int
    taken_bytes: int  # in all, as its device sees it
    error: str  # why it holds less than it should; empty: it does not


class OffloadSpec(Struct, frozen=True, array_like=True):
    """Which layers' weights lie in host memory: as many as have `num_bytes`, or the last `per_group` of every
    `group` layers."""

    num_bytes: int
    group: int
    per_group: int
    ahead: int  # offloaded layers that are fetched before they are needed


class WeightOffload(Struct, frozen=True, array_like=True):
    """Weights that lie in host memory: of some layers, always; with `has_backup` all of them, while the
    device's memory is given back."""

    offload: OffloadSpec | None = None
    has_backup: bool = False


def chosen(wish: OffloadSpec, sizes: list[int]) -> tuple[int, ...]:
    """Which layers lie in host memory, given each one's bytes. Raises StartError where that cannot be, or
    gains nothing."""
    if wish.num_bytes:
        if sum(sizes) < wish.num_bytes:
            raise StartError(
                f"--cpu-offload-gb asks for {wish.num_bytes / 2**30:g} GiB of each rank, and its layers have "
                f"{sum(sizes) / 2**30:.2f}; lower it"
            )
        places: tuple[int, ...] = ()
        # the last ones of equal stretches, so that there is time before each
        while sum(sizes[i] for i in places) < wish.num_bytes:
            count = len(places) + 1
            places = tuple((i + 1) * len(sizes) // count - 1 for i in range(count))
        what = f"--cpu-offload-gb {wish.num_bytes / 2**30:g}"
    else:
        places = tuple(i for i in range(len(sizes)) if i % wish.group >= wish.group - wish.per_group)
        what = f"--offload-group-size {wish.group} with --offload-num-in-group {wish.per_group}"
    if len(places) <= wish.ahead + 1:
        raise StartError(
            f"{what} keeps {len(places)} of {len(sizes)} layers in host memory, and --offload-prefetch-step {wish.ahead} "
            f"takes room for {wish.ahead + 1} of them on the device, so nothing is gained; offload more, or lower "
            "--offload-prefetch-step"
        )
    return places


def in_order(parts: frozenset[Part] | set[Part]) -> tuple[Part, ...]:
    return tuple(part for part in PARTS if part in parts)
