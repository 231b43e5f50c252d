"""What cannot work with this model or device. Each rule returns None or one sentence that names the flags and
the remedy.

All failures are shown at once. What options cannot mean together, whatever the model, stands in conflicts.py.
"""

from collections.abc import Callable

from runtime.cache.pool_sizes import has_two_pools
from runtime.models.quantization_schemes import check_supported
from runtime.options.attention_backends import BACKENDS, why_not, why_unsuited
from runtime.options.facts import DeviceFacts, ModelFacts
from runtime.options.plan import Plan
from runtime.options.table import by_name

Rule = Callable[[Plan, ModelFacts, DeviceFacts], str | None]


def heads_divide(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Each rank computes whole attention heads."""
    size = plan.parallel.tensor_parallel_size
    if model.num_heads % size:
        return f"--tensor-parallel-size {size} does not divide the model's {model.num_heads} attention heads; choose a divisor"
    return None


def kv_heads_divide(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Ranks hold whole key/value heads, or copies of one."""
    size, heads = plan.parallel.tensor_parallel_size, model.num_kv_heads
    if heads % size and size % heads:
        return f"--tensor-parallel-size {size} and the model's {heads} key/value heads are no multiples of one another; choose one"
    return None


def experts_divide(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Ranks hold whole experts, or equal slices of them."""
    size, moe = plan.experts.expert_parallel_size, model.moe
    if moe is None:
        return (
            None
            if size == 1
            else f"--expert-parallel-size {size} spreads experts, and this model has none; leave it out"
        )
    if moe.is_stacked and size > 1:
        return f"--expert-parallel-size {size}: this model's experts are on all ranks, split; leave it out"
    if moe.num_experts % size:
        return f"--expert-parallel-size {size} does not divide the model's {moe.num_experts} experts; choose a divisor"
    split = plan.parallel.tensor_parallel_size // size
    if moe.intermediate_size % split:
        return (
            f"--tensor-parallel-size {plan.parallel.tensor_parallel_size} with --expert-parallel-size {size} splits each expert over {split} "
            f"ranks, which does not divide its inner size {moe.intermediate_size}; raise --expert-parallel-size"
        )
    return None


def exchanges_have_experts(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Tokens travel from rank to rank."""
    if not plan.experts.uses_all_to_all:
        return None
    if model.moe is None:
        return f"--moe-a2a-backend {plan.experts.moe_a2a_backend} brings tokens to experts, and this model has none; leave it out"
    if model.moe.is_stacked:
        return f"--moe-a2a-backend {plan.experts.moe_a2a_backend} brings tokens to whole experts, and this model's are split; leave it out"
    if plan.parallel.tensor_parallel_size == 1:
        return (
            f"--moe-a2a-backend {plan.experts.moe_a2a_backend} brings tokens from rank to rank, and there is one; leave it out, or raise "
            "--tensor-parallel-size"
        )
    return None


def counts_have_experts(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """What is counted are experts that compute."""
    if plan.expert_steps is None or (
        model.moe is not None and not model.moe.is_stacked and device.name != "null"
    ):
        return None
    flag = (
        "--expert-distribution-recorder-mode"
        if plan.experts.expert_distribution_recorder_mode is not None
        else "--enable-expert-distribution-metrics"
    )
    what = "this model" if model.moe is None or model.moe.is_stacked else "the null device"
    return f"{flag} counts the tokens of experts, and {what} has none that it could; leave it out"


def dtype_known(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    possible = (*device.dtypes, *device.other_dtypes)
    if plan.precision.dtype not in ("auto", *possible):
        return f"--dtype {plan.precision.dtype} is not possible on {device.name}; choose one of {', '.join(possible)}"
    return None


def pages_fit_the_kernels(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    sizes, why = (
        (device.latent_page_sizes, " with latent attention (MLA)")
        if model.latent is not None and device.latent_page_sizes
        else (device.page_sizes, "")
    )
    if sizes and plan.memory.page_size not in sizes:
        return (
            f"--page-size {plan.memory.page_size} is not possible on {device.name}{why}; choose "
            f"{'one of ' if len(sizes) > 1 else ''}{', '.join(map(str, sizes))}, or leave it out"
        )
    return None


def latents_have_attention(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """What a rank of the device says of sizes, it says at start."""
    said = [
        by_name()[name].flag
        for name in ("npu_mla_prolog", "npu_nz_cache", "npu_gather_after_q")
        if plan.why[name].value
    ]
    if said and model.latent is None:
        return f"{' and '.join(said)} needs latent attention (MLA), which this model has not; leave it out"
    low = [flag for flag in said if flag != "--npu-nz-cache"]
    if low and model.latent is not None and model.latent.q_rank is None:
        return f"{' and '.join(low)} needs queries of low rank (q_lora_rank), which this model has not; leave it out"
    if plan.ascend.npu_gather_after_q and not plan.experts.uses_all_to_all:
        return "--npu-gather-after-q needs ranks that have parts of a step's tokens; add --moe-a2a-backend, or leave it out"
    return None


def shared_experts_have_others(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    if plan.ascend.npu_multi_stream and (model.moe is None or not model.moe.shared_size):
        return "--npu-multi-stream computes shared experts beside routed ones, and this model has none; leave it out"
    return None


def kv_dtype_known(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    if not device.has_kv_dtypes and plan.precision.kv_cache_dtype != plan.precision.dtype:
        return (
            f"--kv-cache-dtype {plan.precision.kv_cache_dtype} is not possible on {device.name}, which keeps keys and values in {plan.precision.dtype}; "
            "leave it out"
        )
    return None


def kernels_are_the_devices(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    for name, phase in (
        ("attention_backend", None),
        ("prefill_attention_backend", "prefill"),
        ("decode_attention_backend", "decode"),
    ):
        said = plan.why[name].value
        if (reason := why_not(said, phase, device)) is not None:
            return f"{by_name()[name].flag} {said} {reason}; leave it out"
    if plan.kernels.sampling_backend not in device.sampling_backends:
        return (
            f"{by_name()['sampling_backend'].flag} {plan.kernels.sampling_backend} is not possible on {device.name}, which has "
            f"{' and '.join(device.sampling_backends)}; leave it out"
        )
    return None


def kernels_suit_the_model(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    for phase, said in (
        ("prefill", plan.kernels.prefill_attention_backend),
        ("decode", plan.kernels.decode_attention_backend),
    ):
        if said == device.attention_backend or why_not(said, phase, device) is not None:
            continue
        head_dim = None if model.latent is not None else model.head_dim
        if (
            reason := why_unsuited(
                said, plan.memory.page_size, plan.precision.dtype, plan.precision.kv_cache_dtype, head_dim
            )
        ) is not None:
            return f"--{phase}-attention-backend {said} (or --attention-backend) {reason}; take {device.attention_backend}"
    return None


def scores_known(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Some operators know softmax alone."""
    if model.score_cap and not device.has_score_caps:
        return f"this model caps its attention scores (attn_logit_softcapping), which no operator of {device.name} does; take --device cuda"
    if model.has_sinks and not device.has_sinks:
        return f"this model's attention has sinks, which have no adapter on {device.name}; take --device cuda"
    return None


def numbers_have_devices(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    said = [
        by_name()[name].flag for name in ("base_gpu_id", "gpu_id_step") if plan.why[name].source != "default"
    ]
    if said and not device.is_numbered:
        return (
            f"{', '.join(said)} chooses among accelerators, and --device {device.name} is none; leave it out"
        )
    return None


def schemes_known(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Quantised weights are multiplied by kernels of their own."""
    return (
        None
        if model.quantization is None
        else check_supported(model.quantization.schemes, device.schemes, device.name)
    )


def context_within_model(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Positions beyond those the model was made for give noise."""
    if plan.model.context_length > model.context_len:
        return (
            f"--context-length {plan.model.context_length} is beyond the model's {model.context_len} tokens; "
            "lower it, or extend the model's rotary positions in config.json"
        )
    return None


def pages_hold_a_sequence(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    if plan.memory.max_total_tokens is not None and plan.memory.max_total_tokens < 2 * plan.memory.page_size:
        return (
            f"--max-total-tokens {plan.memory.max_total_tokens} is less than two pages of --page-size {plan.memory.page_size}; "
            "raise it or take smaller pages"
        )
    return None


def windows_stay_on_the_device(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Host pages are copies of whole pages, of all layers."""
    if plan.tiers.enable_hierarchical_cache and has_two_pools(
        plan.memory.window_ratio, model.windows, plan.model.context_length
    ):
        return (
            "--enable-hierarchical-cache cannot keep the separate pages of this model's sliding-window layers; "
            "add --disable-hybrid-swa-memory, or leave the host tier out"
        )
    return None


def copies_are_the_devices(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    if plan.tiers.hicache_io_backend not in device.host_copies:
        return (
            f"--hicache-io-backend {plan.tiers.hicache_io_backend} is not possible on {device.name}; "
            f"choose one of {', '.join(device.host_copies)}"
        )
    return None


def options_suit_the_device(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Some options act on some devices only."""
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
    return f"{', '.join(row.flag for row in wrong)} does nothing on --device {device.name}; leave it out, or take --device {wanted}"


def nodes_are_of_ranks(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    if plan.parallel.numa_node is not None and len(plan.parallel.numa_node) not in (
        1,
        plan.parallel.num_ranks,
    ):
        return f"--numa-node names {len(plan.parallel.numa_node)} nodes for {plan.parallel.num_ranks} ranks; give one for all of them, or one for each"
    return None


STATE_OPTIONS = (
    "max_mamba_cache_size",
    "mamba_full_memory_ratio",
    "mamba_scheduler_strategy",
    "mamba_track_interval",
)


def states_have_layers(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    said = [
        by_name()[name].flag for name in STATE_OPTIONS if plan.why[name].source not in ("default", "derived")
    ]
    if said and not model.num_recurrent_layers:
        return f"{', '.join(said)} does nothing with this model, which has no recurrent layers; leave it out"
    return None


def states_end_pages(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """States are kept beside pages of the prefix tree."""
    if model.num_recurrent_layers and plan.states.state_interval % plan.memory.page_size:
        return (
            f"--mamba-track-interval {plan.states.mamba_track_interval} is no multiple of --page-size {plan.memory.page_size}; choose one, or "
            "--mamba-scheduler-strategy no_buffer"
        )
    return None


def states_stay_on_the_device(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The state at the end of a prefix is nowhere but on the device, so nobody could go on from pages that
    come from storage."""
    if model.num_recurrent_layers and plan.tiers.hicache_storage_backend is not None:
        return (
            "--hicache-storage-backend cannot keep the states of this model's recurrent layers; leave it out"
        )
    return None


def weights_are_positive(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    wrong = [
        name
        for name, weight in plan.schedule.fair_share_weights.items()
        if not (isinstance(weight, int | float) and 0 < weight < 1e9)
    ]
    if wrong:
        return f"--fair-share-weights gives {wrong[0]!r} no positive number; give each tenant a weight like 2 or 0.5"
    return None


def grammars_can_be_kept(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    if plan.kernels.grammar_backend != "none" and not device.has_logits:
        return f"--grammar-backend {plan.kernels.grammar_backend} needs logits, which --device {device.name} does not compute; leave it out"
    if (
        plan.api.constrained_json_whitespace_pattern is not None
        and plan.kernels.grammar_backend == "xgrammar"
    ):
        return (
            "--constrained-json-whitespace-pattern is not possible with --grammar-backend xgrammar; take llguidance or outlines, or "
            "--constrained-json-disable-any-whitespace"
        )
    return None


def processors_have_logits(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    if plan.api.enable_custom_logit_processor and device.name == "null":
        return (
            "--enable-custom-logit-processor needs logits, and --device null has none; choose another device"
        )
    return None


def hidden_states_are_computed(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    if plan.api.enable_return_hidden_states and not device.has_logits:
        return f"--enable-return-hidden-states is not possible: --device {device.name} computes none; choose another device"
    if plan.api.enable_return_hidden_states and model.pooling is not None:
        return "--enable-return-hidden-states is for models that generate; this one makes vectors of texts by itself"
    return None


def texts_stay_whole(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """What a token's vector is depends on tokens behind it, or all of them are needed at once."""
    if model.pooling is None or not model.pooling.is_whole:
        return None
    if plan.schedule.chunked_prefill_size > 0:
        return (
            f"--chunked-prefill-size {plan.schedule.chunked_prefill_size} is not possible: this model must see all of a text in one step; "
            "leave it out, or set it to -1"
        )
    if plan.tiers.enable_hierarchical_cache:
        return "--enable-hierarchical-cache is not possible: this model uses no cached prefixes; leave it out"
    return None


def texts_are_computed(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    if model.pooling is not None and not device.has_logits:
        return f"--device {device.name} computes nothing, so it has no vectors; serve a model that generates, or take --device cpu"
    return None


def graphs_have_a_device(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """A profile may be ahead of its device; what somebody says must be true."""
    said = [
        by_name()[name].flag
        for name in ("cuda_graph_max_bs", "cuda_graph_bs", "disable_cuda_graph_padding")
        if not plan.why[name].source.startswith(("default", "derived", "profile"))
    ]
    if not said:
        return None
    if device.graph_max_running == 0:
        return f"{' and '.join(said)}: {device.name} captures no graphs; leave out what says how"
    if plan.graphs.disable_cuda_graph:
        return f"{' and '.join(said)} and --disable-cuda-graph contradict each other; leave one out"
    if (
        plan.kernels.decode_attention_backend != device.attention_backend
        and not BACKENDS[plan.kernels.decode_attention_backend].has_graphs
    ):
        return (
            f"{' and '.join(said)}: decodes of --attention-backend {plan.kernels.decode_attention_backend} are not captured; "
            "take --decode-attention-backend triton, or leave out what says how"
        )
    if plan.experts.uses_all_to_all and plan.experts.deepep_mode == "normal":
        return f"{' and '.join(said)}: no graph can hold the exchange of --deepep-mode normal; take auto or low_latency"
    return None


def pieces_can_be_captured(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    if not plan.graphs.enable_piecewise_cuda_graph:
        return None
    if plan.graphs.disable_cuda_graph:
        return "--enable-piecewise-cuda-graph and --disable-cuda-graph contradict each other; leave one out"
    if plan.experts.uses_all_to_all:
        return (
            "--enable-piecewise-cuda-graph: in steps with prompts --moe-a2a-backend counts on the host how many tokens travel, which "
            "no graph can hold; leave one out"
        )
    largest, most = (
        plan.schedule.max_step_tokens + plan.schedule.max_running_requests,
        max(plan.graphs.piecewise_cuda_graph_tokens),
    )
    if most > largest:
        return (
            f"--piecewise-cuda-graph-tokens {most} is more than any step has ({largest}: --chunked-prefill-size, and a token for each "
            "of --max-running-requests); take fewer"
        )
    return None


def compiled_steps_are_plain(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """What follows an attention must be products, norms and an activation, which is all that is tried through
    the compiler."""
    is_piecewise = plan.graphs.piecewise_cuda_graph_compiler == "inductor"
    if not plan.graphs.enable_torch_compile and not is_piecewise:
        return None
    said = (
        "--enable-torch-compile"
        if plan.graphs.enable_torch_compile
        else "--piecewise-cuda-graph-compiler inductor"
    )
    if plan.graphs.disable_cuda_graph:
        return f"{said} and --disable-cuda-graph contradict each other, as only captured steps are compiled; leave one out"
    lacks = {
        "experts": model.moe is not None,
        "weights in few bits": model.quantization is not None,
        "adapters": plan.lora.enable_lora,
        "several ranks": plan.parallel.num_ranks > 1,
    }
    if any(lacks.values()):
        return f"{said} is not possible with {' and '.join(name for name, has in lacks.items() if has)}; leave it out"
    return None


HOSTED = {"cpu_offload_gb": 0, "offload_group_size": -1, "enable_weights_cpu_backup": False}


def weights_have_a_host(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    said = [by_name()[name].flag for name, off in HOSTED.items() if plan.why[name].value != off]
    if said and device.offload_problem:
        return f"{' and '.join(said)}: weights of {device.name} cannot lie in host memory, as {device.offload_problem}; leave it out"
    if (
        plan.memory.offload_group_size == 0
        or 0 < plan.memory.offload_group_size < plan.memory.offload_num_in_group
    ):
        return (
            f"--offload-group-size {plan.memory.offload_group_size} has no room for --offload-num-in-group {plan.memory.offload_num_in_group}; "
            "raise it, or leave both out"
        )
    if said and (plan.graphs.enable_torch_compile or plan.graphs.piecewise_cuda_graph_compiler == "inductor"):
        return f"{' and '.join(said)} and compiled steps do not go together, as weights come and go; leave one out"
    return None


RULES: tuple[Rule, ...] = (
    compiled_steps_are_plain,
    weights_have_a_host,
    graphs_have_a_device,
    pieces_can_be_captured,
    options_suit_the_device,
    copies_are_the_devices,
    nodes_are_of_ranks,
    processors_have_logits,
    heads_divide,
    kv_heads_divide,
    experts_divide,
    exchanges_have_experts,
    counts_have_experts,
    dtype_known,
    pages_fit_the_kernels,
    latents_have_attention,
    shared_experts_have_others,
    kv_dtype_known,
    kernels_are_the_devices,
    kernels_suit_the_model,
    scores_known,
    numbers_have_devices,
    schemes_known,
    context_within_model,
    pages_hold_a_sequence,
    windows_stay_on_the_device,
    states_have_layers,
    states_end_pages,
    states_stay_on_the_device,
    weights_are_positive,
    grammars_can_be_kept,
    texts_stay_whole,
    hidden_states_are_computed,
    texts_are_computed,
)
