"""A rule on looking at what models compute."""

from runtime.devices.facts import DeviceFacts
from runtime.messages.diagnosis import NOTHING
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules.base import PlanRule


def layers_are_computed(plan: Plan, model: ModelFacts, device: DeviceFacts) -> str | None:
    """Layers are watched where there are any."""
    if device.name != "null" or plan.debug.in_force == NOTHING:
        return None
    return "--device null computes no layers, so none can be watched; take another device, or leave it out"


PLAN_RULES: tuple[PlanRule, ...] = (layers_are_computed,)
