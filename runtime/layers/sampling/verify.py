"""Which drafts are accepted: those on the path of what is sampled.

A token's random number is a pure function of the sequence's seed and the token's position. So sampling after
each token of a row, and accepting drafts as long as they are what is sampled, gives exactly the tokens that
decoding one by one gives: greedy or random, whatever the drafts.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.layers.upload import upload_int64


@dataclass(frozen=True, slots=True)
class DraftRows:
    """`V` rows of up to `C` nodes after which something is sampled: node 0 is the slot's last token, the
    others are drafts."""

    first: np.ndarray  # int64 [V]: the row of logits of node 0; the other nodes' follow it
    counts: np.ndarray  # int64 [V]: nodes
    tokens: np.ndarray  # int64 [V, C]: each draft; -1 for node 0 and beyond the row's nodes
    parents: np.ndarray  # int64 [V, C]: the node that each draft follows; -1 as above
    is_chain: bool  # in every row each draft follows the node before it
    on_device: Tensor | None = None  # `tokens`, where the host does not know all of them

    def depths(self) -> np.ndarray:
        """int64 [V, C]: of each node, the number of drafts on its path."""
        if self.is_chain:
            return np.broadcast_to(np.arange(self.tokens.shape[1]), self.tokens.shape)
        depths = np.zeros_like(self.parents)
        rows = np.arange(len(depths))
        for node in range(1, depths.shape[1]):
            depths[:, node] = depths[rows, self.parents[:, node]] + 1
        return depths

    def path(self, row: int, node: int) -> list[int]:
        """The drafts on the way to a node, itself included."""
        tokens = []
        while node > 0:
            tokens.append(int(self.tokens[row, node]))
            node = int(self.parents[row, node])
        return tokens[::-1]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What of `V` rows is accepted; tensors on the device."""

    num: Tensor  # int64 [V]: accepted drafts, and the token sampled after the last of them
    path: Tensor | None  # int64 [V, C]: the accepted nodes, node 0 first; None: they are 0, 1, 2, ...
    last: Tensor  # int64 [V]: the token sampled last

    def mask(self, rows: DraftRows, num_places: int) -> Tensor:
        """bool [num_places]: of each row of logits, whether what was sampled there is brought; those of other
        rows are."""
        torch_device = self.num.device
        nodes = torch.arange(rows.tokens.shape[1], device=torch_device)
        is_taken = (nodes < self.num.unsqueeze(1)).int()
        if self.path is not None:
            is_taken = torch.zeros_like(is_taken).scatter_add_(1, self.path, is_taken)
        columns = np.arange(rows.tokens.shape[1])
        is_node = columns < rows.counts[:, None]
        places = upload_int64((rows.first[:, None] + columns)[is_node], torch_device)
        accepted = torch.ones(num_places, dtype=torch.bool, device=torch_device)
        accepted[places] = is_taken.flatten()[upload_int64(np.flatnonzero(is_node), torch_device)] > 0
        return accepted


def accept(sampled: Tensor, rows: DraftRows, torch_device: torch.device) -> Accepted:
    """`sampled`, int64 [N]: what was sampled of each row of logits. Waits for nothing."""
    nodes = np.arange(rows.tokens.shape[1])
    at = rows.first[:, None] + np.minimum(nodes, rows.counts[:, None] - 1)
    found = sampled[upload_int64(at, torch_device)]  # [V, C]
    tokens = upload_int64(rows.tokens, torch_device) if rows.on_device is None else rows.on_device
    if rows.is_chain:
        is_right = tokens[:, 1:] == found[:, :-1]
        num = is_right.long().cumprod(1).sum(1) + 1
        return Accepted(num, None, found.gather(1, (num - 1).unsqueeze(1)).squeeze(1))
    parents = upload_int64(rows.parents, torch_device)
    path = torch.zeros_like(tokens)
    node, num = path[:, 0], torch.ones_like(path[:, 0])
    is_open = num > 0
    for depth in range(1, tokens.shape[1]):
        wanted = found.gather(1, node.unsqueeze(1))
        is_next = (parents == node.unsqueeze(1)) & (tokens == wanted)
        is_open = is_open & is_next.any(1)
        node = torch.where(is_open, is_next.int().argmax(1), node)
        path[:, depth] = torch.where(is_open, node, 0)
        num = num + is_open
    return Accepted(num, path, found.gather(1, node.unsqueeze(1)).squeeze(1))
