"""Rules that say how the modules of a checkpoint are quantized. Torch-free.

Names of modules are the checkpoint's, without "model." in front.
"""

import re
from fnmatch import translate

from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.quantization_schemes import WeightFormat

# what checkpoints have in front of names; that of a language model is in models that take images too
PREFIXES = (
    "",
    "model.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
    "thinker.",
    "thinker.model.",
)

ROUTED_EXPERTS = "re:.*\\.experts\\."  # pattern of a rule for these


class Rule(Struct, frozen=True):
    """The format of all modules that a pattern matches."""

    pattern: str  # a name, the end of one, or "re:" and a regular expression; "Linear": every module
    format: WeightFormat | None  # None: plain


def matches(pattern: str, module: str) -> bool:
    """Whether a rule's pattern means this module."""
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], prefix + module) for prefix in PREFIXES)
    name = pattern.removesuffix(".")
    for prefix in ("thinker.", "model.", "language_model.", "model."):
        name = name.removeprefix(prefix)
    return (
        pattern == "Linear"
        or module == name
        or module.startswith(name + ".")
        or module.endswith("." + name)
        or f".{name}." in module
    )


def glob(pattern: str) -> str:
    """The rule's pattern for a shell pattern, whose * stands for any text, dots included."""
    return "re:" + translate(pattern) if "*" in pattern else pattern


def all_but(format: WeightFormat | None, ignored: list[str]) -> tuple[Rule, ...]:
    """One format for all modules but those that the patterns mean."""
    return (*(Rule(pattern, None) for pattern in ignored), Rule("Linear", format))


def need(condition: bool, method: str, what: str) -> None:
    """Raises ModelError unless `condition` holds: the method has a variant that is not read."""
    if not condition:
        raise ModelError(
            f"the checkpoint is quantised by {method} with {what}, which is not supported; "
            "docs/quantization.md lists what is"
        )
