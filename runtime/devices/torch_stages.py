"""Exchange between the stages of a pipeline over torch.distributed."""

from collections import deque
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.messages.stages import Stage


class StageGroups:
    """The process groups of all ranks of one start, `size` of them a stage: those of this rank's stage, and
    two of all ranks, for hidden states and for tokens. What is exchanged in one group stays in its order, so
    that hidden states would wait for tokens if they shared one."""

    def __init__(self, rank: int, size: int, num_stages: int) -> None:
        """Called by all ranks when they have met."""
        self.size = size
        self.rank = rank % size  # in its stage
        self.stage = Stage(rank // size, num_stages)
        firsts = range(0, size * num_stages, size)
        stages = [dist.new_group([*range(first, first + size)]) for first in firsts]
        self.of_stage = cast(dist.ProcessGroup, stages[self.stage.index])
        self.hidden, self.tokens = (cast(dist.ProcessGroup, dist.new_group()) for _ in range(2))

    def rank_in(self, stage: int) -> int:
        """The rank of another stage that this one exchanges with."""
        return stage * self.size + self.rank


class TorchStageLinks:
    """StageLinks over torch.distributed. What is sent is kept until `in_flight` further steps were launched:
    then its receiver has it."""

    def __init__(self, groups: StageGroups, torch_device: torch.device, in_flight: int) -> None:
        self.groups = groups
        self.torch_device = torch_device
        # a step sends hidden states once, or drafts and tokens to each other stage
        self.most = 2 * in_flight * groups.stage.count
        self.sent: deque[tuple[dist.Work | None, Tensor]] = deque()

    def send_hidden(self, hidden: Tensor) -> None:
        """See StageLinks."""
        self._send(hidden, self.groups.stage.index + 1, self.groups.hidden)

    def receive_hidden(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See StageLinks."""
        hidden = torch.empty(shape, dtype=dtype, device=self.torch_device)
        return self._receive(hidden, self.groups.stage.index - 1, self.groups.hidden)

    def send_tokens(self, tokens: Tensor, stage: int) -> None:
        """See StageLinks."""
        self._send(tokens, stage, self.groups.tokens)

    def receive_tokens(self, count: int) -> Tensor:
        """See StageLinks."""
        tokens = torch.empty(count, dtype=torch.int64, device=self.torch_device)
        return self._receive(tokens, self.groups.stage.count - 1, self.groups.tokens)

    def _send(self, x: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        x = x.contiguous()
        self.sent.append((dist.isend(x, self.groups.rank_in(stage), group), x))
        while len(self.sent) > self.most:
            work, _ = self.sent.popleft()
            if work is not None:
                work.wait()

    def _receive(self, x: Tensor, stage: int, group: dist.ProcessGroup) -> Tensor:
        work = dist.irecv(x, self.groups.rank_in(stage), group)
        if work is not None:
            work.wait()
        return x
