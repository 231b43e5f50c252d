"""Rules on cache pages, their host and storage tiers, and weights in host memory."""

from runtime.cache.pool_sizes import has_two_pools
from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.groups.tiers import LMCACHE
from runtime.options.plan import Plan
from runtime.options.rules.base import OptionRule, PlanRule, Values, flag
from runtime.storage import settings

# options that put weights of the model into host memory, with the value that does not
HOST_WEIGHTS = {"cpu_offload_gb": 0, "offload_group_size": -1, "enable_weights_cpu_backup": False}
# and those of any model
ALL_HOST_WEIGHTS = HOST_WEIGHTS | {"enable_draft_weights_cpu_backup": False}


def storage_settings_are_known(options: Values) -> str | None:
    """Settings of the storage backend are valid for it."""
    backend = options["hicache_storage_backend"] or (LMCACHE if options["enable_lmcache"] else None)
    if backend is None:
        return None
    wrong = settings.problem(backend, options["hicache_storage_backend_extra_config"])
    return f"{flag('hicache_storage_backend_extra_config')} {wrong}" if wrong else None


def pool_holds_two_pages(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The cache holds at least two pages."""
    if plan.memory.max_total_tokens is not None and plan.memory.max_total_tokens < 2 * plan.memory.page_size:
        return (
            f"--max-total-tokens {plan.memory.max_total_tokens} is less than two pages of --page-size "
            f"{plan.memory.page_size}; "
            "raise it or take smaller pages"
        )
    return None


def windows_stay_on_the_device(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Host pages are copies of pages of all layers, so separate pages of sliding-window layers have no host
    tier."""
    if plan.tiers.enable_hierarchical_cache and has_two_pools(
        plan.memory.window_ratio, model.windows, plan.model.context_length
    ):
        return (
            "--enable-hierarchical-cache cannot keep the separate pages of this model's sliding-window "
            "layers; "
            "add --disable-hybrid-swa-memory, or leave the host tier out"
        )
    return None


def host_copies_are_possible(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The device can copy pages to host memory in the wanted way."""
    if plan.tiers.hicache_io_backend not in device.host_copies:
        return (
            f"--hicache-io-backend {plan.tiers.hicache_io_backend} is not possible on {device.name}; "
            f"choose one of {', '.join(device.host_copies)}"
        )
    return None


def offloaded_weights_have_room(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Weights can be offloaded to host memory, and the groups of layers have room for the offloaded ones."""
    given = [flag(name) for name, off in ALL_HOST_WEIGHTS.items() if plan.why[name].value != off]
    if given and device.offload_problem:
        return (
            f"{' and '.join(given)}: weights of {device.name} cannot lie in host memory, as "
            f"{device.offload_problem}; leave it out"
        )
    if (
        plan.memory.offload_group_size == 0
        or 0 < plan.memory.offload_group_size < plan.memory.offload_num_in_group
    ):
        return (
            f"--offload-group-size {plan.memory.offload_group_size} has no room for --offload-num-in-group "
            f"{plan.memory.offload_num_in_group}; "
            "raise it, or leave both out"
        )
    given = [name for name in given if name != flag("enable_draft_weights_cpu_backup")]  # never compiled
    if given and (
        plan.graphs.enable_torch_compile or plan.graphs.piecewise_cuda_graph_compiler == "inductor"
    ):
        return (
            f"{' and '.join(given)} and compiled steps do not go together, as weights come and go; leave "
            "one out"
        )
    return None


OPTION_RULES: tuple[OptionRule, ...] = (storage_settings_are_known,)

PLAN_RULES: tuple[PlanRule, ...] = (
    pool_holds_two_pages,
    windows_stay_on_the_device,
    host_copies_are_possible,
    offloaded_weights_have_room,
)
