"""Rules on data-parallel attention: what goes with groups of ranks that have requests of their own."""

from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import OptionRule, PlanRule, Values, flag

# (option, its value when off, why groups do not have it)
NOT_WITH_GROUPS = (
    ("enable_memory_saver", False, "the pages of all groups would have to be given up at once"),
    ("enable_piecewise_cuda_graph", False, "graphs hold no exchange between groups"),
    ("cpu_offload_gb", 0, "it has not been tried"),
    ("offload_group_size", 0, "it has not been tried"),
)
# what moves pages of groups, and its value when off: not in pipelines
NOT_IN_PIPELINES = (("enable_hierarchical_cache", False), ("disaggregation_mode", "null"))


def groups_have_what_they_can(options: Values) -> str | None:
    """What groups do not have yet."""
    if not options["enable_dp_attention"]:
        return None
    for name, off, reason in NOT_WITH_GROUPS:
        if options[name] not in (off, "auto", None, -1):
            return f"--enable-dp-attention does not go with {flag(name)}: {reason}; leave one out"
    if options["pipeline_parallel_size"] not in (1, "auto", None):
        for name, value in NOT_IN_PIPELINES:
            if options[name] not in (value, None):
                return (
                    f"--enable-dp-attention with --pipeline-parallel-size does not go with {flag(name)}: "
                    "pages of groups have been moved within one stage only; leave one out"
                )
    return None


def dense_layers_are_shared_or_whole(options: Values) -> str | None:
    """--moe-dense-tp-size is 1, or all ranks."""
    size, ranks = options["moe_dense_tp_size"], options["tensor_parallel_size"]
    if size not in (None, 1, ranks):
        return (
            f"--moe-dense-tp-size {size} is neither 1, all of a dense layer on each rank, nor "
            f"--tensor-parallel-size {ranks}, which is the default; take one of them"
        )
    return None


def dense_layers_are_of_moe(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """--moe-dense-tp-size 1 is about the dense layers of a model with experts."""
    if not plan.replicates_dense or device.name == "null":
        return None
    if model.moe is None or not model.moe.is_gated or all(model.moe.layers):
        return (
            "--moe-dense-tp-size is about dense layers between those with experts, and this model has none; "
            "leave it out"
        )
    return None


OPTION_RULES: tuple[OptionRule, ...] = (groups_have_what_they_can, dense_layers_are_shared_or_whole)
PLAN_RULES: tuple[PlanRule, ...] = (dense_layers_are_of_moe,)
