"""Rules on data types and kernels: what a device computes, and what of it suits a model."""

from runtime.devices.attention_backends import why_not, why_unsuited
from runtime.devices.cpu.kernels import choice
from runtime.devices.facts import DeviceFacts
from runtime.models.config.media_config import sees_whole_images
from runtime.models.config.quantization_schemes import check_supported
from runtime.options.facts import ModelFacts
from runtime.options.groups.precision import SERVED
from runtime.options.plan import Plan
from runtime.options.rules.base import PlanRule, flag
from runtime.options.table import by_name


def options_are_of_the_device(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Options of some devices only are not set on another one."""
    wrong = [
        row
        for name, row in by_name().items()
        if row.devices
        and device.name not in row.devices
        and plan.why[name].source not in ("default", "derived")
        and plan.why[name].value != row.default
    ]
    if not wrong:
        return None
    wanted = " or ".join(wrong[0].devices)
    return (
        f"{', '.join(row.flag for row in wrong)} does nothing on --device {device.name}; leave it out, or "
        f"take --device {wanted}"
    )


def dtype_known(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The device computes in the wanted dtype."""
    possible = (*device.dtypes, *device.other_dtypes)
    if plan.precision.dtype not in ("auto", *possible):
        return (
            f"--dtype {plan.precision.dtype} is not possible on {device.name}; choose one of "
            f"{', '.join(possible)}"
        )
    return None


SCALED = ("fp8_e4m3", "int8")  # dtypes of a cache with scales


def kv_dtype_known(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The device can keep keys and values in the wanted dtype, and int8 has scales."""
    if plan.precision.kv_cache_dtype == "int8":
        if not device.has_int8_kv or model.mla is not None:
            what = device.name
            if model.mla is not None:
                what = (
                    "latent attention (MLA), whose kernels read latents in int8 with queries in int8 alone, "
                    "and not those of prompts"
                )
            return f"--kv-cache-dtype int8 is not possible with {what}; leave it out"
        if plan.precision.quantization_param_path is None:
            return (
                "--kv-cache-dtype int8 needs the scales of the cache; give --quantization-param-path, or "
                "leave it out"
            )
        return None
    if not device.has_kv_dtypes and plan.precision.kv_cache_dtype != plan.precision.dtype:
        return (
            f"--kv-cache-dtype {plan.precision.kv_cache_dtype} is not possible on {device.name}, which "
            f"keeps keys and values in {plan.precision.dtype}; "
            "leave it out"
        )
    return None


def schemes_known(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The device has kernels for the model's quantization schemes."""
    if model.quantization is None:
        return None
    held = model.quantization.on_device(device.schemes)
    return check_supported(held.schemes, device.schemes, device.name)


def cache_scales_have_a_use(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Scales of a cache are for one of 8 bits that holds keys and values."""
    if plan.precision.quantization_param_path is None:
        return None
    if model.mla is not None:
        return "--quantization-param-path has no use with latent attention (MLA); leave it out"
    if plan.precision.kv_cache_dtype not in SCALED:
        return (
            f"--quantization-param-path has scales for --kv-cache-dtype {' or '.join(SCALED)}; add that, or "
            "leave it out"
        )
    return None


def quantizing_is_known(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """--quantize-and-serve names what weights are quantized to, and can do it without calibration."""
    if not plan.precision.quantize_and_serve:
        return None
    wanted = plan.precision.modelopt_quant or plan.precision.quantization
    if wanted in SERVED:
        return None
    return (
        f"--quantize-and-serve cannot quantize to {wanted or 'what no option names'}; add --modelopt-quant "
        "fp8, or take --quantization int4 in its place"
    )


def pages_fit_the_kernels(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The device's attention kernels take pages of the wanted size."""
    sizes, why = (
        (device.latent_page_sizes, " with latent attention (MLA)")
        if model.mla is not None and device.latent_page_sizes
        else (device.page_sizes, "")
    )
    if sizes and plan.memory.page_size not in sizes:
        return (
            f"--page-size {plan.memory.page_size} is not possible on {device.name}{why}; choose "
            f"{'one of ' if len(sizes) > 1 else ''}{', '.join(map(str, sizes))}, or leave it out"
        )
    return None


def kernels_are_the_devices(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The device has the chosen kernels of attention and sampling."""
    for name, phase in (
        ("attention_backend", None),
        ("prefill_attention_backend", "prefill"),
        ("decode_attention_backend", "decode"),
    ):
        backend = plan.why[name].value
        if (reason := why_not(backend, phase, device)) is not None:
            return f"{flag(name)} {backend} {reason}; leave it out"
    if plan.kernels.sampling_backend not in device.sampling_backends:
        return (
            f"{flag('sampling_backend')} {plan.kernels.sampling_backend} is not possible on {device.name}, "
            "which has "
            f"{' and '.join(device.sampling_backends)}; leave it out"
        )
    return None


def towers_have_the_devices_attention(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The device has the chosen attention of towers of images and sounds."""
    if (backend := plan.kernels.mm_attention_backend) in device.tower_attentions:
        return None
    return (
        f"--mm-attention-backend {backend} is not possible on {device.name}, whose towers have "
        f"{' and '.join(device.tower_attentions)}; leave it out"
    )


def kernels_suit_the_model(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The chosen attention kernels can compute this model with these pages and dtypes."""
    for phase, backend in (
        ("prefill", plan.kernels.prefill_attention_backend),
        ("decode", plan.kernels.decode_attention_backend),
    ):
        if backend == device.attention_backend or why_not(backend, phase, device) is not None:
            continue
        head_dim = None if model.mla is not None else model.longest_head
        if (
            reason := why_unsuited(
                backend,
                plan.memory.page_size,
                plan.precision.dtype,
                plan.precision.kv_cache_dtype,
                head_dim,
                is_biased=model.scores.is_biased,
                is_capped=model.scores.cap > 0,
                latent_dims=None if model.mla is None else (model.mla.kv_rank, model.mla.rope_dim),
            )
        ) is not None:
            return (
                f"--{phase}-attention-backend {backend} (or --attention-backend) {reason}; take "
                f"{device.attention_backend}"
            )
    return None


def attention_scores_are_supported(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Models that cap or bias attention scores, have sinks or choose tokens need a device whose attention
    does that."""
    if model.mla is not None and model.mla.indexer is not None:
        if not device.gathers_rows and not device.has_indexers:
            return (
                f"this model's tokens attend to some others (index_topk), which {device.name} does not "
                "compute; take --device cpu or npu"
            )
    chunk = model.scores.chunk
    if chunk and plan.model.context_length > chunk and not device.gathers_rows:
        return (
            f"this model attends within chunks of {chunk} tokens, which {device.name} does not compute "
            f"for longer texts; give --context-length {chunk}, or take --device cpu"
        )
    if model.scores.cap and not device.has_score_caps:
        return (
            "this model caps its attention scores (attn_logit_softcapping), which no operator of "
            f"{device.name} does; take --device cuda"
        )
    if model.scores.has_sinks and not device.has_sinks:
        return f"this model's attention has sinks, which have no adapter on {device.name}; take --device cuda"
    if model.scores.is_biased and not device.has_score_biases:
        return (
            "this model adds biases of distance to its attention scores (alibi), which no operator of "
            f"{device.name} does over pages; take --device cpu or cuda"
        )
    return None


def latents_have_attention(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Options of latent attention (MLA) need a model with it. Shapes are checked by the ranks when they
    start."""
    given = [flag(name) for name in ("npu_mla_prolog", "npu_gather_after_q") if plan.why[name].value]
    if given and model.mla is None:
        return f"{' and '.join(given)} needs latent attention (MLA), which this model has not; leave it out"
    if given and model.mla is not None and model.mla.q_rank is None:
        return (
            f"{' and '.join(given)} needs queries of low rank (q_lora_rank), which this model has not; leave "
            "it out"
        )
    is_own = not plan.why["npu_mla_prolog"].source.startswith("profile")
    if plan.ascend.npu_mla_prolog and plan.lora.enable_lora and is_own:
        return "--npu-mla-prolog computes projections that adapters change; leave it or --enable-lora out"
    if plan.ascend.npu_gather_after_q and not plan.experts.uses_all_to_all:
        return (
            "--npu-gather-after-q needs ranks that have parts of a step's tokens; add --moe-a2a-backend, "
            "or leave it out"
        )
    return None


def pages_suit_nz(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The device's attention reads pages of these heads in NZ."""
    if not plan.ascend.npu_nz_cache or model.mla is not None:
        return None
    what = ""
    sizes = sorted(model.head_sizes)
    if len(sizes) > 1 or sizes[0] not in device.nz_heads:
        known = " or ".join(map(str, device.nz_heads))
        what = f"heads of {known} numbers, and this model has some of {' and '.join(map(str, sizes))}"
    elif model.scores.cap or model.scores.is_biased:
        what = "attention of the NPU's own, and this model's scores are computed in torch"
    elif plan.precision.kv_cache_dtype == "int8":
        what = "pages in the dtype of activations, not for --kv-cache-dtype int8"
    elif plan.model.enable_multimodal and sees_whole_images(model.media):
        what = "causal attention, and this model's images attend to all of their tokens"
    return f"--npu-nz-cache is for latents (MLA) and for {what}; leave it out" if what else None


def bits_are_of_own_kernels(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """What computes a request's tokens is known to give them the same bits in any batch."""
    if not plan.kernels.enable_deterministic_inference or device.name != "cpu":
        return None
    if not choice.usable_levels():
        return (
            "--enable-deterministic-inference needs the kernels of --device cpu, and torch computes here; "
            f"{choice.remedy()}, or leave it out"
        )
    if plan.model.model_impl == "transformers":
        return (
            "--enable-deterministic-inference and --model-impl transformers: its code computes by operators "
            "of torch, whose bits depend on the batch; leave one out"
        )
    if model.num_recurrent_layers:
        return (
            "--enable-deterministic-inference: bits of recurrent layers depend on where a prompt is cut and "
            "on what of it was cached; leave it out"
        )
    return None


PLAN_RULES: tuple[PlanRule, ...] = (
    options_are_of_the_device,
    bits_are_of_own_kernels,
    dtype_known,
    kv_dtype_known,
    schemes_known,
    cache_scales_have_a_use,
    quantizing_is_known,
    pages_fit_the_kernels,
    kernels_are_the_devices,
    towers_have_the_devices_attention,
    kernels_suit_the_model,
    attention_scores_are_supported,
    latents_have_attention,
    pages_suit_nz,
)
