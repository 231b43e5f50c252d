"""Rules on diffusion models, which fill in blocks of tokens."""

from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import PlanRule

DEVICES = ("cpu", "cuda")  # that were seen to attend to blocks, cuda in the interpreter of its kernels


def blocks_have_an_algorithm(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """--dllm-algorithm is given for diffusion models, and for no others."""
    algorithm = plan.states.dllm_algorithm
    if model.diffusion is None and algorithm is not None:
        return (
            f"--dllm-algorithm {algorithm} is for diffusion models (SDAR, LLaDA 2); this model samples one "
            "token after the other, so leave it out"
        )
    if model.diffusion is not None and algorithm is None:
        return "this model fills in blocks of tokens; say how with --dllm-algorithm LowConfidence"
    return None


def blocks_are_attended_to(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """The device is one that was seen to compute blocks."""
    if model.diffusion is None or device.name in DEVICES:
        return None
    return (
        f"--device {device.name} computes no diffusion models: its attention was never tried on blocks whose "
        f"tokens see each other; choose one of {', '.join(DEVICES)}"
    )


PLAN_RULES: tuple[PlanRule, ...] = (blocks_have_an_algorithm, blocks_are_attended_to)
