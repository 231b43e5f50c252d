"""Timing model of the null device, which computes nothing."""

from typing import Annotated as A

from runtime.options.declare import Auto, Count, Group, Seconds, option


class Null(Group, frozen=True, kw_only=True):
    """Null device"""

    null_step_s: A[Seconds, option("Seconds that the null device takes for a step.")] = 0.0
    null_token_s: A[Seconds, option("Seconds that it takes for each token of a step, on top.")] = 0.0
    null_vocab_size: A[Count | Auto, option("Token ids that it draws from; auto is the model's vocabulary.")] = "auto"
