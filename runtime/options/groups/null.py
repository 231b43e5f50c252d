"""Timing model and faults of the null device, which computes nothing."""

from typing import Annotated as A
from typing import Literal

from runtime.options.declare import Auto, Count, Derived, Group, Seconds, Whole, option
from runtime.options.facts import ModelFacts


class Null(Group, frozen=True, kw_only=True):
    """Null device"""

    null_step_s: A[Seconds, option("Seconds that the null device takes for a step.")] = 0.0
    null_token_s: A[Seconds, option("Seconds that it takes for each token of a step, on top.")] = 0.0
    null_vocab_size: A[
        Count | Auto, option("Token ids that it draws from; auto is the model's vocabulary.")
    ] = "auto"
    null_first_token: A[
        Whole,
        option("First of the 26 token ids that its answers go through; 0 where the vocabulary is too small."),
    ] = 97
    null_poison_token: A[
        Whole | None, option("Token at which it fails when it computes it, to try recovery out.")
    ] = None
    null_poison: A[
        Literal["raise", "kill", "hang"],
        option("How it fails: an exception, the end of its process, or no answer."),
    ] = "raise"


class NullPlan(Null, frozen=True, kw_only=True):
    """Settings of the null device in force."""

    null_vocab_size: int


def null_vocab_size(model: ModelFacts) -> Derived:
    """The null device draws from the model's vocabulary."""
    return Derived(model.vocab_size, "the model's vocabulary")
