"""Kernels of attention by name: what each can do, as data. A device has its own; of the others, what would have to be there first."""

from msgspec import Struct

from runtime.options.facts import DeviceFacts

PHASES = ("prefill", "decode")


class Backend(Struct, frozen=True, kw_only=True):
    """What is always true of an implementation of attention."""

    devices: tuple[str, ...]
    phases: tuple[str, ...] = PHASES
    package: str | None = None  # that it comes with; None: with the runtime, or with torch
    page_sizes: tuple[int, ...] = ()  # (): any
    is_latent: bool = False  # for multi-head latent attention alone
    capability: tuple[int, int] = (8, 0)  # the oldest card that has it


BACKENDS = {
    "torch_native": Backend(devices=("cpu", "cuda")),
    "triton": Backend(devices=("cuda",), package="triton"),
    "ascend": Backend(devices=("npu",), package="torch_npu", page_sizes=(128, 256, 384, 512)),
    "flex_attention": Backend(devices=("cuda",)),
    "flashinfer": Backend(devices=("cuda",), package="flashinfer-python"),
    "fa3": Backend(devices=("cuda",), package="sgl-kernel", capability=(9, 0)),
    "fa4": Backend(devices=("cuda",), package="flash-attn-4", capability=(9, 0)),
    "flashmla": Backend(devices=("cuda",), package="sgl-kernel", page_sizes=(64,), is_latent=True, capability=(9, 0)),
    "cutlass_mla": Backend(devices=("cuda",), phases=("decode",), package="sgl-kernel", page_sizes=(128,), is_latent=True,
                           capability=(10, 0)),
    "trtllm_mha": Backend(devices=("cuda",), package="flashinfer-python", page_sizes=(16, 32, 64), capability=(10, 0)),
    "trtllm_mla": Backend(devices=("cuda",), package="flashinfer-python", page_sizes=(32, 64), is_latent=True, capability=(10, 0)),
}


def why_not(name: str, phase: str | None, device: DeviceFacts) -> str | None:
    """Why a device does not attend with these kernels, as the end of a sentence; None: it does."""
    if name == device.attention_backend:
        return None
    backend = BACKENDS.get(name)
    if backend is None or device.name not in backend.devices:
        return f"is not possible on {device.name}, which has {device.attention_backend}"
    if phase is not None and phase not in backend.phases:
        return f"has no {phase}"
    comes = "" if backend.package is None else f" with the package {backend.package}"
    return f"would come{comes}, and has no adapter here yet; {device.name} has {device.attention_backend}"
