"""Rules on the states of recurrent layers."""

from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import OptionRule, PlanRule, Values, flag

STATE_OPTIONS = (
    "max_mamba_cache_size",
    "mamba_ssm_dtype",
    "mamba_full_memory_ratio",
    "mamba_scheduler_strategy",
    "mamba_track_interval",
    "mamba_backend",
)


def states_align_with_pages(options: Values) -> str | None:
    """Kept states lie at page boundaries, and no closer together than a draft is long."""
    interval, page, drafts = (
        options["mamba_track_interval"],
        options["page_size"],
        options["speculative_num_draft_tokens"],
    )
    if options["mamba_scheduler_strategy"] != "extra_buffer":
        return None
    if page != "auto" and interval % page:
        return f"--mamba-track-interval {interval} is no multiple of --page-size {page}; choose one"
    if drafts != "auto" and interval < drafts:
        return f"--mamba-track-interval {interval} is below --speculative-num-draft-tokens {drafts}; raise it"
    return None


def states_have_layers(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Options of sequence states need a model with recurrent layers."""
    given = [flag(name) for name in STATE_OPTIONS if plan.why[name].source not in ("default", "derived")]
    if given and not model.num_recurrent_layers:
        return f"{', '.join(given)} does nothing with this model, which has no recurrent layers; leave it out"
    return None


def kernels_are_the_devices(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """--mamba-backend names kernels that the device has."""
    if plan.states.mamba_backend not in device.recurrent_backends:
        return (
            f"--mamba-backend {plan.states.mamba_backend} is not possible on {device.name}, which has "
            f"{', '.join(device.recurrent_backends)}; leave it out"
        )
    return None


def states_end_pages(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """States are kept at the ends of pages of the prefix tree."""
    if model.num_recurrent_layers and plan.states.state_interval % plan.memory.page_size:
        return (
            f"--mamba-track-interval {plan.states.mamba_track_interval} is no multiple of --page-size "
            f"{plan.memory.page_size}; choose one, or "
            "--mamba-scheduler-strategy no_buffer"
        )
    return None


def recurrent_layers_are_not_compiled(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """torch.compile computes what follows an attention, and recurrent layers have none."""
    is_piecewise = plan.graphs.piecewise_cuda_graph_compiler == "inductor"
    if model.num_recurrent_layers and (plan.graphs.enable_torch_compile or is_piecewise):
        name = "--piecewise-cuda-graph-compiler inductor" if is_piecewise else "--enable-torch-compile"
        return f"{name} does not compile recurrent layers, which this model has; leave it out"
    return None


OPTION_RULES: tuple[OptionRule, ...] = (states_align_with_pages,)

PLAN_RULES: tuple[PlanRule, ...] = (
    states_have_layers,
    kernels_are_the_devices,
    states_end_pages,
    recurrent_layers_are_not_compiled,
)
