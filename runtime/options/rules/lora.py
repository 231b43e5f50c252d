"""Rules on LoRA adapters."""

from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.groups.lora import lora_backend
from runtime.options.plan import Plan
from runtime.options.rules.base import OptionRule, PlanRule, Values


def adapters_are_described(options: Values) -> str | None:
    """The size of adapters is known at start, by --lora-paths or by rank and target modules."""
    if options["lora_paths"] and options["enable_lora"] is False:
        return "--lora-paths does nothing with --no-enable-lora; leave one out"
    if (
        options["enable_lora"] is True
        and not options["lora_paths"]
        and not (options["max_lora_rank"] and options["lora_target_modules"])
    ):
        return (
            "--enable-lora without --lora-paths requires --max-lora-rank and --lora-target-modules, to "
            "know how much room adapters take"
        )
    if (
        options["lora_target_modules"]
        and "all" in options["lora_target_modules"]
        and len(options["lora_target_modules"]) > 1
    ):
        return "--lora-target-modules all stands alone; leave the other names out"
    return None


def adapters_fit(options: Values) -> str | None:
    """Host memory has room for the adapters of --lora-paths and of one step."""
    loaded, mixed, paths = (
        options["max_loaded_loras"],
        options["max_loras_per_batch"],
        options["lora_paths"] or (),
    )
    if loaded is None:
        return None
    if loaded < mixed:
        return f"--max-loaded-loras {loaded} is below --max-loras-per-batch {mixed}; raise it"
    if len(paths) > loaded:
        return f"--lora-paths names {len(paths)} adapters, but --max-loaded-loras is {loaded}; raise it"
    return None


def kernels_are_the_devices(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """--lora-backend names the kernels that the device has."""
    own = lora_backend(device).value
    if plan.lora.lora_backend != own and (plan.lora.lora_backend, own) != ("csgmv", "triton"):
        return (
            f"--lora-backend {plan.lora.lora_backend} is not possible on {device.name}, which has {own}; "
            "leave it out"
        )
    return None


OPTION_RULES: tuple[OptionRule, ...] = (adapters_are_described, adapters_fit)

PLAN_RULES: tuple[PlanRule, ...] = (kernels_are_the_devices,)
