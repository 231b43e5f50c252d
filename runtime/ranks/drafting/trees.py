"""Trees of drafts, grown where a draft model thinks it likely (EAGLE-2, Li et al., 2024).

A node's score is the probability of its path by the draft model. From level to level the likeliest new nodes
are looked behind, and of all nodes found the likeliest are drafts: parents are likelier than their children,
so what is chosen hangs together. A tree ends where none of its new nodes is among these: it is deep where the
model is certain, and broad where it is not. What sampling will take if the draft model is right counts as the
likeliest of its siblings.

A level's pass computes the tree above it again: attention knows trees of a row's own queries only.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from runtime.layers.upload import upload_int64
from runtime.ranks.drafting.network import Computed
from runtime.ranks.drafting.own_rows import OwnRows

if TYPE_CHECKING:
    from runtime.ranks.drafting.draft_runner import DraftRunner


@dataclass(slots=True)
class Tree:
    """Nodes of one row, in the order in which they were found; parents come before their children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # -1: the row's last token
    depths: list[int] = field(default_factory=list)  # 1 behind that
    scores: list[float] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)  # nodes that passes have looked behind, in order
    found: dict[int, Tensor] = field(default_factory=dict)  # states that passes gave behind nodes

    def add(self, parent: int, tokens: list[int], scores: list[float]) -> list[int]:
        """Children of a node. -> the new nodes"""
        first = len(self.tokens)
        depth = 1 if parent < 0 else self.depths[parent] + 1
        above = 0.0 if parent < 0 else self.scores[parent]
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.depths += [depth] * len(tokens)
        self.scores += [above + score for score in scores]
        return list(range(first, len(self.tokens)))

    def best(self, nodes: list[int], count: int) -> list[int]:
        """The likeliest of these nodes, the earlier ones of equals, in the order in which they were found."""
        return sorted(sorted(nodes, key=lambda node: (-self.scores[node], node))[:count])

    def beam(self, nodes: list[int], branches: int, count: int) -> list[int]:
        """Those of the `nodes` of one level that are worth looking behind where `count` are to be drafts: at
        most `branches`, and none behind which no other can be among the `count` likeliest."""
        likely = set(self.best(list(range(len(self.tokens))), count - 1))
        room = min(branches, count - len(self.expanded))
        return [node for node in self.best(nodes, room) if node in likely]

    def drafts(self, count: int) -> tuple[list[int], list[int]]:
        """The likeliest nodes: their tokens, and which token of the row each follows, 0 being its last. Where
        there are too few, the first one again."""
        chosen = self.best(list(range(len(self.tokens))), count)
        place = {-1: 0} | {node: index + 1 for index, node in enumerate(chosen)}
        missing = count - len(chosen)  # of a tree that is shallower than it may be
        return (
            [self.tokens[node] for node in chosen] + [self.tokens[0]] * missing,
            [place[self.parents[node]] for node in chosen] + [0] * missing,
        )

    def row(self) -> tuple[list[int], np.ndarray]:
        """Depths of the row's queries, its last token and the nodes that were looked behind, and which query
        each of them follows."""
        place = {-1: 0} | {node: index + 1 for index, node in enumerate(self.expanded)}
        parents = [-1] + [place[self.parents[node]] for node in self.expanded]
        return [0] + [self.depths[node] for node in self.expanded], np.array(parents)


def candidates(logits: Tensor, sampled: Tensor, temperatures: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens behind each of N nodes and their log probabilities, [N, count]; `sampled`,
    int64 [N], counts as the likeliest. `temperatures`: float32 [N], 0 for greedy rows."""
    scale = torch.where(temperatures > 0, temperatures, 1.0).unsqueeze(1)
    scores = (logits / scale).log_softmax(dim=1)
    scores.scatter_(1, sampled.unsqueeze(1), (scores.amax(dim=1, keepdim=True) + 1e-6).clamp_max(0))
    found = scores.topk(min(count, scores.shape[1]), dim=1)
    return found.indices, found.values


class Trees:
    """Trees of the rows of one step, grown level by level."""

    def __init__(self, runner: "DraftRunner", rows: OwnRows, slots: np.ndarray, starts: np.ndarray) -> None:
        self.runner, self.rows, self.slots, self.starts = runner, rows, slots, starts
        self.at = starts - runner.network.shift  # the entry that the row's last token ends in
        self.trees = [Tree() for _ in slots]

    def grown(self, num_levels: int, branches: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 [D]: the drafts of all rows, and which token of its row each follows. `branches`: nodes
        that a level looks behind, and tokens behind each."""
        runner, everything = self.runner, np.arange(len(self.slots))
        found, self.roots, self.root_states = runner.catch_up(self.slots, self.starts)
        runner.pending.reached(self.slots, self.at + 1)
        new = self.add(found, everything, [-1] * len(everything), branches)
        for _ in range(num_levels - 1):
            beams = [
                tree.beam(nodes, branches, count)
                for tree, nodes, count in zip(self.trees, new, self.rows.counts.tolist(), strict=True)
            ]
            if not any(beams):
                break
            new = self.look_behind(beams, branches)
        drafts = [
            tree.drafts(count) for tree, count in zip(self.trees, self.rows.counts.tolist(), strict=True)
        ]
        tokens, parents = (np.array([x for draft in drafts for x in draft[i]], np.int32) for i in (0, 1))
        return tokens, parents

    def add(self, found: Computed, rows: np.ndarray, nodes: list[int], branches: int) -> list[list[int]]:
        """Candidates behind nodes of these rows. -> by row, the nodes that are new"""
        runner = self.runner
        depths = [
            0 if node < 0 else self.trees[row].depths[node] for row, node in zip(rows, nodes, strict=True)
        ]
        lengths = self.starts[rows] + 1 + np.array(depths)
        sampled = runner.sampled(found.logits, self.slots[rows], lengths)
        index = upload_int64(self.slots[rows], sampled.device)
        tokens, scores = candidates(found.logits, sampled, runner.slots.floats[index, 0], branches)
        if runner.network.ids is not None:
            tokens = runner.network.ids[tokens]
        tokens = runner.device.group_ranks.broadcast(tokens)
        new: list[list[int]] = [[] for _ in self.trees]
        for place, (row, node) in enumerate(zip(rows.tolist(), nodes, strict=True)):
            new[row] += self.trees[row].add(node, tokens[place].tolist(), scores[place].tolist())
            if found.states is not None:
                self.trees[row].found[node] = found.states[place]
        return new

    def look_behind(self, beams: list[list[int]], branches: int) -> list[list[int]]:
        """A pass over the trees with these nodes at their ends. -> by row, the nodes that are new"""
        runner, rows = self.runner, np.array([row for row, beam in enumerate(beams) if beam])
        tokens, states, depths = list[int](), list[Tensor](), list[int]()
        parents, counts, samples, ends = dict[int, np.ndarray](), list[int](), list[int](), list[int]()
        owners = list[int]()
        for place, row in enumerate(rows.tolist()):
            tree = self.trees[row]
            tree.expanded += beams[row]
            own_depths, parents[place] = tree.row()
            depths += own_depths
            tokens += [int(self.roots[row]), *(tree.tokens[node] for node in tree.expanded)]
            states += [self.root_states[row], *(tree.found.get(tree.parents[node]) for node in tree.expanded)]
            counts.append(len(own_depths))
            samples += range(len(tokens) - len(beams[row]), len(tokens))
            ends += beams[row]
            owners += [row] * len(beams[row])
        torch_device = runner.device.torch_device
        found = runner.compute(
            self.slots[rows],
            self.at[rows],
            np.array(counts),
            torch.tensor(tokens, device=torch_device),
            torch.stack(states) if runner.network.shift else None,
            np.array(samples),
            np.array(depths),
            parents,
        )
        assert found is not None, "it samples"
        return self.add(found, np.array(owners), ends, branches)
