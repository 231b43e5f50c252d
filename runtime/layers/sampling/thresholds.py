"""Acceptance of drafts beyond what is sampled (--speculative-accept-threshold-single, -acc), which changes
the distribution of tokens.

Of a random token with the probabilities p, behind which the drafts d_1 ... d_n stand as siblings, a number u
that is uniform in [0, 1) accepts the first draft for which

    u < (p(d_1) + ... + p(d_i)) / acc    or    p(d_i) >= single

and where none is accepted, the token is one of p without the drafts. At acc = single = 1 that is p itself. u
is made of the token x that sampling by p has found: where x is d_i, u is in the i-th of the drafts' shares of
[0, 1), else behind them. So a draft that is what sampling finds is always accepted, and where no draft is
accepted, x is the token.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.sampling.sampler import host_uniform, token_chances
from runtime.layers.sampling.verify import DraftRows
from runtime.layers.upload import upload, upload_int64

SALT = 0x5851F42D4C957F2D  # tells the random numbers of this file from those that tokens are sampled with


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a draft is accepted that was not sampled."""

    single: float = 1.0  # its probability is at least this
    acc: float = 1.0  # probabilities are divided by this

    @property
    def is_exact(self) -> bool:
        """Whether drafts are accepted when they are what is sampled, and only then."""
        return self.single >= 1 and self.acc >= 1

    def accept(
        self,
        logits: Tensor,
        inputs: SamplingInputs,
        sampled: Tensor,
        drafts: DraftRows,
        seeds: np.ndarray,
        positions: np.ndarray,
    ) -> Tensor:
        """Tokens in place of `sampled`, int64 [N]: the accepted draft of each row of float32 logits [N, V],
        or what was sampled. `seeds` and `positions`, int64 [N]: of the tokens; rows with temperature 0 keep
        theirs."""
        torch_device = logits.device
        row, node = np.nonzero(drafts.parents >= 0)
        if not len(row):
            return sampled
        place, parents = (
            upload_int64(ids, torch_device)
            for ids in (drafts.first[row] + drafts.parents[row, node], drafts.parents)
        )
        index = upload_int64(row, torch_device), upload_int64(node, torch_device)
        tokens = upload_int64(drafts.tokens, torch_device) if drafts.on_device is None else drafts.on_device
        chances = torch.zeros(tokens.shape, dtype=torch.float64, device=torch_device)
        chances[index] = token_chances(logits, inputs, place, tokens[index])
        # of a draft, its own chance and those of its siblings before it, and those of all siblings
        is_sibling = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (parents >= 0).unsqueeze(1)
        sums = (is_sibling.tril() * chances.unsqueeze(1)).sum(2)[index]
        totals = (is_sibling * chances.unsqueeze(1)).sum(2)[index]
        chances, tokens = chances[index], tokens[index]
        noise = upload(host_uniform(seeds ^ SALT, positions), torch_device)[place]
        is_found, zeros = (
            tokens == sampled[place],
            torch.zeros(len(logits), dtype=torch.float64, device=torch_device),
        )
        inside = zeros.index_add(0, place, is_found * (sums - chances + noise * chances))
        is_inside = zeros.index_add(0, place, is_found.double()) > 0
        share = torch.where(is_inside[place], inside[place], totals + noise * (1 - totals))
        is_accepted = (share * self.acc < sums) | (chances >= self.single) | is_found
        is_accepted &= (chances > 0) & (inputs.temperature[place] > 0)
        order = torch.arange(len(tokens), device=torch_device)  # siblings stand in their order
        none = torch.full((len(logits),), len(tokens), dtype=torch.int64, device=torch_device)
        first = none.scatter_reduce(0, place, torch.where(is_accepted, order, len(tokens)), "amin")
        return torch.where(first < len(tokens), tokens[first.clamp_max(len(tokens) - 1)], sampled)


EXACT = Thresholds()
