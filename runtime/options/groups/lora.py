"""LoRA adapters."""

from typing import Annotated as A
from typing import Literal

from runtime.devices.facts import DeviceFacts
from runtime.options.declare import Auto, Count, Derived, Group, on_device, option, superseded


class Lora(Group, frozen=True, kw_only=True):
    """LoRA"""

    enable_lora: A[
        bool | Auto,
        option("Serve low-rank adapters in addition to the model; auto: where --lora-paths names some."),
    ] = "auto"
    enable_lora_overlap_loading: A[
        bool,
        superseded(
            "Copy adapters to the device while steps run.", "Adapters are always read while steps run."
        ),
    ] = False
    max_lora_rank: A[
        Count | None, option("Largest rank of an adapter; without it, that of --lora-paths.")
    ] = None
    lora_target_modules: A[
        tuple[str, ...] | None,
        option("Layers that adapters may change, or all; without it, those of --lora-paths."),
    ] = None
    lora_paths: A[tuple[str, ...] | None, option("Adapters to load at start: PATH, NAME=PATH, or JSON.")] = (
        None
    )
    max_loras_per_batch: A[
        Count, option("Adapters that one step may mix. The plain model is not counted.")
    ] = 8
    max_loaded_loras: A[
        Count | None,
        option(
            "Adapters that host memory holds. Beyond, the one not asked for longest leaves for a new one."
        ),
    ] = None
    lora_eviction_policy: A[
        Literal["lru", "fifo"],
        option("Which adapter leaves the device when its room is full, of those that no request uses."),
    ] = "lru"
    lora_backend: A[
        Literal["triton", "csgmv", "ascend", "torch_native"] | Auto,
        option(
            "Kernels that compute adapters: triton on CUDA, else torch_native.",
            later=("ascend",),
            missing="other kernels than the device's own",
            note="csgmv, SGLang's default, is another name of triton: rows are computed in tiles of one adapter",
        ),
    ] = "auto"
    max_lora_chunk_size: A[
        Literal[16, 32, 64, 128], on_device("cuda", "Tokens in one chunk of the chunked adapter kernels.")
    ] = 16


class LoraPlan(Lora, frozen=True, kw_only=True):
    """LoRA settings in force."""

    enable_lora: bool
    lora_backend: str


def enable_lora(paths: tuple[str, ...] | None) -> Derived:
    """LoRA is on where --lora-paths names adapters."""
    return Derived(bool(paths), "--lora-paths names adapters" if paths else "no --lora-paths")


def lora_backend(device: DeviceFacts) -> Derived:
    """The device's own LoRA kernels."""
    return Derived(
        "triton" if device.name == "cuda" else "torch_native", f"they are the kernels of {device.name}"
    )
