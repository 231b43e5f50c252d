"""All rules at once: on the options alone when they are parsed, and on the plan for a model and device."""

from runtime.devices.facts import DeviceFacts
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.rules import (
    attention_groups,
    context,
    debug,
    diffusion,
    experts,
    graphs,
    kernels,
    lora,
    media,
    memory,
    parallel,
    pipeline,
    serving,
    speculation,
    states,
    tables,
)
from runtime.options.rules import model as model_rules
from runtime.options.rules.base import OptionRule, PlanRule, Values

OPTION_RULES: tuple[OptionRule, ...] = (
    *serving.OPTION_RULES,
    *model_rules.OPTION_RULES,
    *parallel.OPTION_RULES,
    *attention_groups.OPTION_RULES,
    *experts.OPTION_RULES,
    *speculation.OPTION_RULES,
    *lora.OPTION_RULES,
    *states.OPTION_RULES,
    *memory.OPTION_RULES,
    *media.OPTION_RULES,
)
PLAN_RULES: tuple[PlanRule, ...] = (
    *graphs.PLAN_RULES,
    *parallel.PLAN_RULES,
    *attention_groups.PLAN_RULES,
    *pipeline.PLAN_RULES,
    *context.PLAN_RULES,
    *experts.PLAN_RULES,
    *kernels.PLAN_RULES,
    *lora.PLAN_RULES,
    *model_rules.PLAN_RULES,
    *memory.PLAN_RULES,
    *states.PLAN_RULES,
    *diffusion.PLAN_RULES,
    *speculation.PLAN_RULES,
    *serving.PLAN_RULES,
    *media.PLAN_RULES,
    *debug.PLAN_RULES,
)


def option_problems(options: Values) -> list[str]:
    """A sentence for everything that cannot be meant together, whatever the model and device."""
    return [*tables.problems(options), *(problem for rule in OPTION_RULES if (problem := rule(options)))]


def plan_problems(plan: Plan, model: ModelFacts, device: DeviceFacts) -> list[str]:
    """A sentence for everything in the plan that this model or device cannot do."""
    return [problem for rule in PLAN_RULES if (problem := rule(plan, model, device))]
