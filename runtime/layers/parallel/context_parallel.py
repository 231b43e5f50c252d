"""Context parallelism: ranks that have the same attention heads share the queries of prompts.

In a step with prompts each of these ranks projects and attends to its part of the prompts' tokens, whose keys
and values are gathered, so that the pages of every rank have those of all tokens. Behind attention the ranks'
parts are gathered again: what is between attentions is computed of all tokens, and divided as without parts.

Rows that decode or verify drafts have few queries: all ranks compute them, alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.base import Collectives


@dataclass(frozen=True, slots=True)
class TokenPart:
    """The tokens of one step whose queries this rank computes. `T`: tokens of the step; the first
    `num_common` of them are in the part of every rank; `P`: tokens of this rank's part, with these."""

    ranks: Collectives
    num_common: int
    indices: Tensor  # int64 [P], rising: this rank's part of the step's tokens
    largest: int  # tokens of the largest part, without common ones
    # int64 [T - num_common]: where each token is in the parts of all ranks, padded to `largest` and joined
    places: Tensor

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of a tensor of all tokens: [T, ...] -> [P, ...]."""
        return x.index_select(0, self.indices)

    def all_tokens(self, x: Tensor) -> Tensor:
        """The parts of all ranks together: [P, ...] -> [T, ...]."""
        common, rest = x[: self.num_common], x[self.num_common :]
        padding = (0, 0) * (rest.dim() - 1) + (0, self.largest - len(rest))
        joined = self.ranks.all_gather(pad(rest, padding), 0)
        found = joined.index_select(0, self.places)
        return torch.cat((common, found)) if self.num_common else found


def own_tokens(part: TokenPart | None, x: Tensor) -> Tensor:
    """What attention is given: x [T, ...] of all tokens itself, or this rank's part of it, [P, ...]."""
    return x if part is None else part.own(x)


def of_all_parts(part: TokenPart | None, x: Tensor) -> Tensor:
    """[T, ...] of all tokens: x itself, or gathered where x is of this rank's part, [P, ...]."""
    return x if part is None else part.all_tokens(x)
