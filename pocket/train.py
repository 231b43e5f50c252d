"""Training of pocket: `python -m pocket.train OUT --work DIR`.

Each step draws fresh conversations from the seed and the number of the step alone, so a
run that was stopped goes on exactly where it was.  The loss is on the assistant's words.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from pocket import evaluate, model, network, tokenizer
from pocket.corpus import Sample, conversation, sample

LONGEST = 1536


@dataclass(frozen=True)
class Plan:
    """The settings of a run; the same settings give the same run."""

    seed: int = 0
    steps: int = 2400
    tokens: int = 4608
    rate: float = 3e-3
    warm: int = 100
    cool: float = 0.35


Row = tuple[list[int], list[bool]]


def rate_at(plan: Plan, step: int) -> float:
    """Give the learning rate: warm up, hold, and fall in a straight line at the end."""
    start = plan.steps * (1 - plan.cool)
    fall = 1.0 if step < start else max(0.0, (plan.steps - step) / (plan.steps - start))
    return plan.rate * min(1.0, (step + 1) / plan.warm) * fall


def encode(batch: list[Sample], coder: Tokenizer) -> list[Row]:
    """Turn samples into tokens and say which tokens are to be predicted."""
    rows: list[Row] = []
    for item, encoded in zip(batch, coder.encode_batch([s.text for s in batch]), strict=True):
        flags = [any(a <= start < b for a, b in item.spans) for start, _ in encoded.offsets]
        rows.append((encoded.ids, flags))
    return rows


def rows_for(plan: Plan, step: int, coder: Tokenizer) -> list[Row]:
    """Draw the conversations of one step, sorted by length."""
    rng = random.Random(f"pocket-{plan.seed}-{step}")
    rows: list[Row] = []
    while sum(len(ids) for ids, _ in rows) < plan.tokens:
        fresh = encode([sample(conversation(rng)) for _ in range(4)], coder)
        rows.extend(row for row in fresh if len(row[0]) <= LONGEST)
    return sorted(rows, key=lambda row: len(row[0]))


def chunks(rows: list[Row], limit: int = 1536) -> list[list[Row]]:
    """Group rows of similar length, so that little is spent on padding."""
    groups: list[list[Row]] = [[]]
    for row in rows:
        if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > limit:
            groups.append([])
        groups[-1].append(row)
    return groups


def chunk_gradient(
    weights: network.Weights, rows: list[Row], total: int
) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Compute what one padded group contributes to the step's loss and gradient."""
    torch.set_num_threads(1)
    width = -(-max(len(ids) for ids, _ in rows) // 16) * 16
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    wanted = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, flags) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        wanted[i, : len(row)] = torch.tensor(flags)
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    states = network.hidden(leaves, ids)[:, :-1][wanted[:, 1:]]
    logits = functional.linear(states, leaves["model.embed_tokens.weight"])
    loss = functional.cross_entropy(logits.float(), ids[:, 1:][wanted[:, 1:]], reduction="sum") / total
    return loss.item(), torch.autograd.grad(loss, list(leaves.values()))


def train_step(
    pool: ThreadPoolExecutor,
    net: Qwen3ForCausalLM,
    opts: list[torch.optim.Optimizer],
    rows: list[Row],
    rate: float,
) -> float:
    """Take one optimizer step over all groups; returns the mean loss.

    Each group runs on one thread.  On a busy machine that is much faster than sharing
    every operation between the threads, and adding up in order keeps it deterministic.
    """
    total = sum(sum(flags[1:]) for _, flags in rows)
    weights = network.cast(net)
    parameters = list(net.parameters())
    mean = 0.0
    for loss, gradients in pool.map(
        lambda group: chunk_gradient(weights, group, total), reversed(chunks(rows))
    ):
        mean += loss
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.float() if parameter.grad is None else parameter.grad.add_(gradient)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for opt in opts:
        for settings in opt.param_groups:
            settings["lr"] = rate
    list(pool.map(_apply, opts))
    return mean


def _apply(opt: torch.optim.Optimizer) -> None:
    torch.set_num_threads(1)
    opt.step()
    opt.zero_grad(set_to_none=True)


def say(text: str) -> None:
    """Write a line of progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(plan: Plan, out: Path, work: Path, *, threads: int, save_every: int) -> None:
    """Train from the last checkpoint, or from scratch, to the end of the plan."""
    torch.manual_seed(plan.seed)
    net = model.build()
    opts = model.optimizers(net, plan.rate)
    if not (work / "tokenizer.json").exists():
        tokenizer.save(tokenizer.train(plan.seed), work)
    coder = Tokenizer.from_file(str(work / "tokenizer.json"))
    tokenizer.save(coder, out)
    first = 0
    if (work / "checkpoint.json").exists():
        first = int(model.load_checkpoint(work, net, opts)["step"])
    pool = ThreadPoolExecutor(threads)
    say(f"{sum(p.numel() for p in net.parameters())} parameters, step {first} of {plan.steps}")
    began, seen, losses = time.monotonic(), 0, []
    coming = pool.submit(rows_for, plan, first, coder)
    for step in range(first, plan.steps):
        rows = coming.result()
        coming = pool.submit(rows_for, plan, step + 1, coder)
        losses.append(train_step(pool, net, opts, rows, rate_at(plan, step)))
        seen += sum(len(ids) for ids, _ in rows)
        if (step + 1) % 25 == 0:
            mean, losses = sum(losses) / len(losses), []
            say(
                f"step {step + 1} loss {mean:.4f} rate {rate_at(plan, step):.5f} "
                f"{seen / (time.monotonic() - began):.0f} tokens/s"
            )
        if (step + 1) % save_every == 0 or step + 1 == plan.steps:
            model.save_checkpoint(work, net, opts, {"step": step + 1, "seed": plan.seed})
            model.export(net, out)
    say(f"{time.monotonic() - began:.0f} s of training")


def main() -> None:
    """Train, export and evaluate from the command line."""
    parser = argparse.ArgumentParser(description="Train pocket and print its held-out rates.")
    parser.add_argument("out", type=Path, help="folder for the finished model")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--questions", type=int, default=100, help="held-out questions of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(seed=arguments.seed, steps=arguments.steps)
    run(plan, arguments.out, arguments.work, threads=arguments.threads, save_every=arguments.save_every)
    torch.set_num_threads(arguments.threads)
    say(evaluate.table(evaluate.evaluate(arguments.out, arguments.questions, seed=plan.seed)))


if __name__ == "__main__":
    main()
