"""The two kinds of rules, and what they share.

A rule is a function that returns None, or one sentence which names the flags and the remedy. All rules are
asked, and all sentences are shown at once.
"""

from collections.abc import Callable, Mapping

from runtime.devices.facts import DeviceFacts
from runtime.options.declare import Value
from runtime.options.facts import ModelFacts
from runtime.options.plan import Plan
from runtime.options.table import by_name

Values = Mapping[str, Value]  # every option by name: the given value, or the default

OptionRule = Callable[
    [Values], str | None
]  # what options cannot mean together, whatever the model and device
PlanRule = Callable[[Plan, ModelFacts, DeviceFacts], str | None]  # what this model or device cannot do


def first_of(reasons: Mapping[str, bool]) -> str | None:
    """The first reason that applies; None: none does."""
    return next((reason for reason, applies in reasons.items() if applies), None)


def flag(name: str) -> str:
    """The flag of an option by the name of its field."""
    return by_name()[name].flag


def is_set(options: Values, name: str) -> bool:
    """Whether an option asks for anything: it is neither its default nor off."""
    return options[name] != by_name()[name].default and options[name] not in (False, None, "none", "null", "")
