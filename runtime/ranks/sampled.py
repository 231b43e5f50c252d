"""What a step has sampled, before it is reported."""

from dataclasses import dataclass

from torch import Tensor

from runtime.layers.sampling.sampler import Logprobs
from runtime.ranks.sample_rows import SampleRows


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step has sampled, on the device."""

    tokens: Tensor  # int64 [N], after each place where the step samples
    logprobs: Logprobs | None  # of these tokens; None: not asked for
    rows: SampleRows | None  # where that is; None: after each row of a captured step
    # of verify rows, int64 [V] and [V, C]: how much is accepted and which nodes; None: no such rows, or
    # chains
    num_accepted: Tensor | None = None
    path: Tensor | None = None
