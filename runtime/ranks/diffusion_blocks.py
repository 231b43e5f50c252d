"""The end of a step of a diffusion model: a token for each place of the blocks that it fills in, and how
likely it is. Which of them are kept, the scheduler says (scheduling/diffusion/algorithms.py)."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from runtime.devices.decoder_spec import Forwarded
from runtime.devices.executor import Pending
from runtime.devices.operands import LogitsOps
from runtime.layers.sampling.sampler import FAR, clean, token_chances
from runtime.layers.upload import upload_int64
from runtime.messages.steps import BlockSampling, StepPlan, StepResult
from runtime.ranks.launched import Launched, Unreported
from runtime.ranks.sample_rows import SampleRows
from runtime.ranks.slots import Slots
from runtime.ranks.step_copies import end_copies

if TYPE_CHECKING:
    from runtime.ranks.model_runner import ModelRunner

NO_TOKENS, NO_NUMBERS = np.empty(0, np.int32), np.empty(0, np.float32)


def sample_blocks(
    runner: "ModelRunner",
    plan: StepPlan,
    blocks: BlockSampling,
    starts: np.ndarray,
    rows: SampleRows,
    forwarded: Forwarded,
    begin: float,
) -> Pending:
    """Samples at the places of blocks, and moves the slots on by the tokens before them. `starts`, int64 [R]:
    the lengths before; `begin`: when the step was launched, in seconds."""
    logits = runner.logits.sampled(runner.model, forwarded, rows.places, None, rows.packed)
    runner.effects.advance(plan, starts, rows)
    runner.sampled_step = plan.step
    end_copies(runner.copies, plan, runner.saves, runner.transfers, runner.device)
    if not runner.samples:
        return Unreported()
    if logits is None:
        tensors = [torch.empty(0), torch.empty(0)]
    else:
        logits = without_masks(logits, plan, blocks, rows)
        tensors = list(choose(runner.slots, runner.logits_ops, logits, rows))

    def finish(arrays: list[np.ndarray]) -> StepResult:
        return StepResult(
            plan.step,
            arrays[0].astype(np.int32),
            -1,
            NO_NUMBERS,
            NO_TOKENS,
            NO_NUMBERS,
            [],
            runner.seconds(begin),
            num_tokens=np.full(len(rows.rows), blocks.size, np.int32),
            confidences=arrays[1],
        )

    return Launched(runner.transfers.fetch(tensors), finish)


def without_masks(logits: Tensor, plan: StepPlan, blocks: BlockSampling, rows: SampleRows) -> Tensor:
    """Finite logits [N, V] in which the mask is banned, and the token before each place is penalised."""
    clean(logits)
    if blocks.repeat_penalty:
        nodes = np.arange(len(rows.places))
        follows = nodes[nodes % blocks.size > 0]
        before = plan.token_ids[rows.places[follows] - 1].astype(np.int64)
        index = upload_int64(follows, logits.device), upload_int64(before, logits.device)
        logits[index] = logits[index] - blocks.repeat_penalty
    logits[:, blocks.mask_id] = -FAR
    return logits


def choose(slots: Slots, logits_ops: LogitsOps, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
    """Tokens, int64 [N], of finite logits [N, V], and the probability of each, float32 [N]: as it was
    sampled, with temperature and filters, and of a greedy one by softmax."""
    inputs = slots.random_inputs(rows) if slots.needs.is_random[rows.slots].any() else None
    tokens = logits_ops.choose(logits, inputs)
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    likely = (chosen - logits.logsumexp(1)).exp()
    if inputs is None:
        return tokens, likely
    every = torch.arange(len(tokens), device=logits.device)
    chances = token_chances(logits, inputs, every, tokens).float()
    return tokens, torch.where(inputs.temperature > 0, chances, likely)
