"""Rules on mixture-of-experts models: how experts and tokens are spread over ranks."""

from runtime.devices.facts import DeviceFacts
from runtime.options.declare import Value
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import OptionRule, PlanRule, Values


def experts_fit_ranks(options: Values) -> str | None:
    """Experts are spread over the tensor-parallel ranks, or over equal groups of these."""
    experts, ranks = options["expert_parallel_size"], options["tensor_parallel_size"]
    if experts == "tp":
        experts = ranks
    if experts > 1 and ranks % experts:
        return (
            f"--expert-parallel-size {experts} does not divide --tensor-parallel-size {ranks}; choose a "
            "divisor"
        )
    if options["moe_a2a_backend"] != "none" and experts not in (1, ranks):
        return (
            f"--moe-a2a-backend {options['moe_a2a_backend']} spreads experts over all ranks; leave "
            "--expert-parallel-size out "
            f"or give {ranks}"
        )
    if (
        options["moe_runner_backend"] == "cutlass"
        and options["quantization"] in ("fp8", "mxfp8")
        and experts > 1
    ):
        return (
            f"--moe-runner-backend cutlass has no {options['quantization']} with --expert-parallel-size "
            "above 1; choose another runner"
        )
    return None


def records_hold_steps(options: Values) -> str | None:
    """The record of expert counts holds some steps, or all."""
    if options["expert_distribution_recorder_buffer_size"] == 0:
        return (
            "--expert-distribution-recorder-buffer-size 0 holds no step; give a number of steps, or -1 "
            "for all"
        )
    return None


# options of places of experts, and their values without any
PLACES: tuple[tuple[str, Value], ...] = (
    ("enable_eplb", False),
    ("ep_num_redundant_experts", 0),
    ("init_expert_location", "trivial"),
    ("ep_dispatch_algorithm", None),
)


def places_need_spread_experts(options: Values) -> str | None:
    """Experts have places where they are spread over ranks."""
    given = [name for name, plain in PLACES if options[name] != plain]
    if given and options["expert_parallel_size"] == 1 and options["moe_a2a_backend"] == "none":
        flag = "--" + given[0].replace("_", "-")
        return f"{flag} does nothing without experts spread over ranks; give --expert-parallel-size above 1"
    return None


def placing_needs_files(options: Values) -> str | None:
    """Weights of experts that move are read from the checkpoint."""
    if options["enable_eplb"] and options["load_format"] in ("dummy", "sharded_state"):
        return (
            f"--enable-eplb reads experts from the checkpoint, and --load-format {options['load_format']} "
            "has not those of all ranks; leave one of them out"
        )
    return None


def copies_fit_places(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Groups of ranks have equally many places of experts, and no expert twice."""
    copies, groups, moe = (
        plan.experts.ep_num_redundant_experts,
        plan.experts.expert_parallel_size,
        model.moe,
    )
    if not copies or moe is None:
        return None
    if (moe.num_experts + copies) % groups:
        return (
            f"--ep-num-redundant-experts {copies} and {moe.num_experts} experts cannot be spread evenly over "
            f"{groups} groups of ranks; give {copies + groups - (moe.num_experts + copies) % groups}"
        )
    if copies > moe.num_experts * (groups - 1):
        return (
            f"--ep-num-redundant-experts {copies} are more copies than {groups} groups of ranks can have of "
            f"{moe.num_experts} experts; give at most {moe.num_experts * (groups - 1)}"
        )
    return None


def experts_divide(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Ranks hold whole experts and copies of them, equally many each, or slices of them."""
    size, moe = plan.experts.expert_parallel_size, model.moe
    if moe is None:
        return (
            None
            if size == 1
            else f"--expert-parallel-size {size} spreads experts, and this model has none; leave it out"
        )
    if moe.is_on_all_ranks and size > 1:
        return f"--expert-parallel-size {size}: this model's experts are on all ranks, split; leave it out"
    if moe.num_experts % size and not plan.experts.ep_num_redundant_experts:
        return (
            f"--expert-parallel-size {size} does not divide the model's {moe.num_experts} experts; choose "
            f"a divisor, or fill the groups with copies: --ep-num-redundant-experts "
            f"{-moe.num_experts % size}"
        )
    split = plan.parallel.tensor_parallel_size // size
    if moe.intermediate_size < split:
        return (
            f"--tensor-parallel-size {plan.parallel.tensor_parallel_size} with --expert-parallel-size "
            f"{size} splits each expert over {split} ranks, more than its inner size "
            f"{moe.intermediate_size}; raise --expert-parallel-size"
        )
    return None


def all_to_all_has_experts(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """An all-to-all backend needs a mixture-of-experts model with unsplit experts, and several ranks."""
    if not plan.experts.uses_all_to_all:
        return None
    if model.moe is None:
        return (
            f"--moe-a2a-backend {plan.experts.moe_a2a_backend} brings tokens to experts, and this model "
            "has none; leave it out"
        )
    if model.moe.is_on_all_ranks:
        return (
            f"--moe-a2a-backend {plan.experts.moe_a2a_backend} brings tokens to whole experts, and this "
            "model's are split; leave it out"
        )
    if plan.parallel.tensor_parallel_size == 1:
        return (
            f"--moe-a2a-backend {plan.experts.moe_a2a_backend} brings tokens from rank to rank, and there "
            "is one; leave it out, or raise "
            "--tensor-parallel-size"
        )
    return None


def counts_have_experts(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Counting the tokens of experts needs experts that are computed."""
    if plan.expert_steps is None or (
        model.moe is not None and not model.moe.is_on_all_ranks and device.name != "null"
    ):
        return None
    flag = "--enable-expert-distribution-metrics"
    if plan.experts.expert_distribution_recorder_mode is not None:
        flag = "--expert-distribution-recorder-mode"
    elif plan.experts.enable_eplb:
        flag = "--enable-eplb"
    what = "this model" if model.moe is None or model.moe.is_on_all_ranks else "the null device"
    return f"{flag} counts the tokens of experts, and {what} has none that it could; leave it out"


def reported_experts_are_on_one_rank(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """--enable-return-routed-experts: rank 0 reports, and must route all tokens in all layers."""
    if not plan.api.enable_return_routed_experts:
        return None
    parallel, flag = plan.parallel, "--enable-return-routed-experts"
    if not device.has_logits:
        return f"{flag} is not possible: --device {device.name} computes no experts; choose another device"
    if model.moe is None or model.moe.is_on_all_ranks:
        return f"{flag} reports experts, and this model has none that it could; leave it out"
    others = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--enable-dp-attention": parallel.enable_dp_attention,
        "--attention-context-parallel-size": parallel.attention_context_parallel_size > 1,
        "--moe-a2a-backend": plan.experts.moe_a2a_backend != "none",
        "--enable-two-batch-overlap": plan.kernels.enable_two_batch_overlap,
    }
    for other, is_set in others.items():
        if is_set:
            return f"{flag} takes ranks that route all tokens of a step, without {other}; leave one out"
    return None


def shared_experts_have_others(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """A second stream for shared experts needs a model with shared experts."""
    if plan.ascend.npu_multi_stream and (model.moe is None or not model.moe.shared_size):
        return (
            "--npu-multi-stream computes shared experts next to routed ones, and this model has none; leave "
            "it out"
        )
    return None


OPTION_RULES: tuple[OptionRule, ...] = (
    experts_fit_ranks,
    records_hold_steps,
    places_need_spread_experts,
    placing_needs_files,
)

PLAN_RULES: tuple[PlanRule, ...] = (
    experts_divide,
    all_to_all_has_experts,
    copies_fit_places,
    counts_have_experts,
    reported_experts_are_on_one_rank,
    shared_experts_have_others,
)
