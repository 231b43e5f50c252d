"""Attention backends by name: what each can do, as data, and why a device or a model cannot use one."""

from msgspec import Struct

from runtime.devices.facts import DeviceFacts

PHASES = ("prefill", "decode")
HALVES = ("bfloat16", "float16")


class Backend(Struct, frozen=True, kw_only=True):
    """What an attention backend requires and supports."""

    devices: tuple[str, ...]
    phases: tuple[str, ...] = PHASES
    package: str | None = None  # the package with its kernels; None: the runtime or torch
    page_sizes: tuple[int, ...] = ()  # (): any
    is_latent: bool | None = False  # True: latent attention (MLA) only; None: both kinds
    majors: tuple[int, ...] = ()  # major compute capabilities that it needs; (): any
    has_adapter: bool = True
    read: str | None = None  # version of the package whose documentation the adapter follows
    install: str | None = None  # what to install, if not `package`
    has_graphs: bool = True  # whether its decode steps can be captured
    dtypes: tuple[str, ...] = ()  # dtypes that it computes in; (): all of the device
    head_dims: tuple[int, ...] = ()  # supported head sizes; (): all up to 256
    has_kv_dtypes: bool = True  # False: keys and values must have the dtype of queries
    has_caps: bool = True  # caps scores (Gemma 2)
    has_biases: bool = False  # adds biases by distance to scores (ALiBi)
    latent_dims: tuple[int, int] | None = None  # latent and rotary numbers of a token (MLA); None: any
    joins_latents: bool = False  # reads a token's latent and rotary part as one row of a page


BACKENDS = {
    "torch_native": Backend(devices=("cpu", "cuda"), has_graphs=False, has_biases=True),
    "triton": Backend(devices=("cuda",), package="triton", is_latent=None, has_biases=True),
    "ascend": Backend(devices=("npu",), package="torch_npu", page_sizes=(128, 256, 384, 512)),
    "flex_attention": Backend(devices=("cuda",), has_graphs=False),
    "cudnn": Backend(devices=("cuda",), phases=("prefill",), is_latent=None, has_biases=True),
    "flashinfer": Backend(
        devices=("cuda",), package="flashinfer-python", read="0.7.2", dtypes=HALVES, head_dims=(64, 128, 256)
    ),
    "fa3": Backend(
        devices=("cuda",),
        package="flash_attn_interface",
        read="3.0.0, commit 01afd16",
        dtypes=HALVES,
        majors=(9,),
        install="FlashAttention 3: the folder hopper of Dao-AILab/flash-attention",
        has_kv_dtypes=False,
    ),
    "fa4": Backend(
        devices=("cuda",),
        package="flash-attn-4",
        read="4.0.0b36",
        dtypes=HALVES,
        majors=(9, 10, 11),
        has_kv_dtypes=False,
    ),
    "flashmla": Backend(
        devices=("cuda",),
        package="flash_mla",
        read="1.0.0, commit 9241ae3",
        dtypes=HALVES,
        page_sizes=(64,),
        is_latent=True,
        latent_dims=(512, 64),
        joins_latents=True,
        majors=(9,),
        install="FlashMLA: git clone --recursive deepseek-ai/FlashMLA, and pip install . in it",
        has_kv_dtypes=False,
    ),
    "cutlass_mla": Backend(
        devices=("cuda",),
        phases=("decode",),
        package="sgl-kernel",
        page_sizes=(128,),
        is_latent=True,
        majors=(10,),
        has_adapter=False,
    ),
    "trtllm_mha": Backend(
        devices=("cuda",),
        package="flashinfer-python",
        read="0.7.2",
        dtypes=HALVES,
        page_sizes=(16, 32, 64),
        head_dims=(64, 128),
        majors=(10,),
        has_kv_dtypes=False,
        has_caps=False,
    ),
    "trtllm_mla": Backend(
        devices=("cuda",),
        phases=("decode",),
        package="flashinfer-python",
        read="0.7.2",
        dtypes=("bfloat16",),
        page_sizes=(32, 64),
        is_latent=True,
        latent_dims=(512, 64),
        joins_latents=True,
        majors=(10,),
        has_kv_dtypes=False,
    ),
}


def why_not(name: str, phase: str | None, device: DeviceFacts) -> str | None:
    """Why a device cannot use an attention backend, as the end of a sentence; None: it can. `phase` None: for
    both prefill and decode."""
    if name == device.attention_backend:
        return None
    backend = BACKENDS.get(name)
    if backend is None or device.name not in backend.devices:
        return f"is not possible on {device.name}, which has {device.attention_backend}"
    if phase is not None and phase not in backend.phases:
        return f"has no {phase}"
    if backend.has_adapter and device.name == "cuda":
        return None
    comes = "" if backend.package is None else f" with the package {backend.package}"
    return f"would come{comes}, and has no adapter here yet; {device.name} has {', '.join(offered(device))}"


def offered(device: DeviceFacts) -> tuple[str, ...]:
    """The values of --attention-backend that a device supports."""
    if device.name != "cuda":
        return (device.attention_backend,)
    return tuple(
        name for name, backend in BACKENDS.items() if device.name in backend.devices and backend.has_adapter
    )


def why_unsuited(
    name: str,
    page_size: int,
    dtype: str,
    kv_dtype: str,
    head_dim: int | None,
    *,
    is_biased: bool = False,
    is_capped: bool = False,
    latent_dims: tuple[int, int] | None = None,
) -> str | None:
    """Why a backend of the device cannot compute a model with such pages, as the end of a sentence; None: it
    can. `head_dim` None: latent attention, of `latent_dims` latent and rotary numbers; `is_biased` and
    `is_capped`: the model adds biases by distance to its scores, or caps them."""
    backend = BACKENDS[name]
    if backend.is_latent is not None and backend.is_latent != (head_dim is None):
        return "is for latent attention (MLA) alone" if backend.is_latent else "has no latent attention (MLA)"
    if backend.latent_dims and latent_dims not in (None, backend.latent_dims):
        known, found = (" and ".join(map(str, dims)) for dims in (backend.latent_dims, latent_dims or ()))
        return f"takes latents and rotary parts of {known} numbers, and the model's have {found}"
    if backend.page_sizes and page_size not in backend.page_sizes:
        return f"takes pages of {', '.join(map(str, backend.page_sizes))} tokens, not --page-size {page_size}"
    if backend.dtypes and dtype not in (*backend.dtypes, "auto"):
        return f"computes in {' and '.join(backend.dtypes)}, not in {dtype}"
    if not backend.has_kv_dtypes and kv_dtype != dtype:
        return f"takes pages of {dtype} only, not --kv-cache-dtype {kv_dtype}"
    if backend.head_dims and head_dim is not None and head_dim not in backend.head_dims:
        return f"takes heads of {', '.join(map(str, backend.head_dims))}, and the model's have {head_dim}"
    if is_biased and not backend.has_biases:
        return "adds no biases of distance to scores (alibi)"
    if is_capped and not backend.has_caps:
        return "caps no scores (attn_logit_softcapping)"
    return None
