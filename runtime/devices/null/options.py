"""Options that only the null device has: which tokens it answers, how long steps take, and how they fail.
Torch-free."""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

_Seconds = A[float, Meta(ge=0, le=3600)]
_Token = A[int, Meta(ge=0, lt=2**31)]
Poison = Literal["raise", "kill", "hang"]


class NullOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """StartRank.device_options of the null device. By default tokens are a..z, of a vocabulary of bytes."""

    step_s: _Seconds = 0.0  # seconds of a step
    token_s: _Seconds = 0.0  # in addition, for each token computed
    vocab_size: A[int, Meta(ge=1, lt=2**31)] = 32000
    first_token: _Token = 97
    num_tokens: A[int, Meta(ge=1)] = 26
    script: list[_Token] = []
    fail_at_step: int | None = None  # the step at which to raise, for tests of recovery
    # a step that computes this token, of a prompt or sampled before, fails as `poison` says
    poison_token: _Token | None = None
    # raise an exception; end the process as the OOM killer does; never finish the step
    poison: Poison = "raise"
