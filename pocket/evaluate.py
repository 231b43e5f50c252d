"""Held-out evaluation: greedy answers, judged by exact rules.

A turn is right when it ends by itself with the end-of-turn token and what it says equals
an accepted answer: the same text, the same JSON, the same calls with the same arguments.
When reasoning was asked for there must be some, otherwise there must be none.  A question
counts as right when all of its assistant turns are right, each after the right history.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from pocket.corpus import KINDS, Conversation, held_out
from pocket.exchange import Message
from pocket.template import END, render

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"^<think>\n(.+?)\n</think>\n\n", re.DOTALL)


@dataclass(frozen=True)
class Turn:
    """One assistant turn to be answered: its prompt and what is right."""

    question: int
    prompt: str
    wanted: Message
    accept: tuple[str, ...]
    thinks: bool


@dataclass
class Score:
    """What was found for one kind."""

    asked: int = 0
    right: int = 0
    ended: int = 0
    turns: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)


def turns_of(made: Conversation, question: int) -> list[Turn]:
    """Split a conversation into the turns that the model has to give."""
    turns = []
    last = len(made.messages) - 1
    for i, message in enumerate(made.messages):
        if message["role"] == "assistant":
            prompt = render(
                list(made.messages[:i]), list(made.tools), made.enable_thinking, add_generation_prompt=True
            )
            accept = made.exchanges[0].accept if i == last else ()
            accept = accept or (message["content"],)
            turns.append(Turn(question, prompt, message, accept, "reasoning_content" in message))
    return turns


def is_right(turn: Turn, reply: str) -> bool:
    """Judge one reply by the exact rules."""
    if not reply.endswith(END):
        return False
    said = reply.removesuffix(END)
    thought = _THOUGHT.match(said)
    if (thought is not None) != turn.thinks:
        return False
    if thought is not None:
        said = said[thought.end() :]
    wanted = [call["function"] for call in turn.wanted.get("tool_calls", ())]
    try:
        calls: list[Any] = [json.loads(text) for text in _CALL.findall(said)]
    except json.JSONDecodeError:
        return False
    if calls != [{"name": f["name"], "arguments": f["arguments"]} for f in wanted]:
        return False
    return bool(wanted) or said in turn.accept


@torch.inference_mode()
def greedy(net: Any, coder: Tokenizer, prompts: list[str], limit: int = 400) -> list[str]:
    """Answer prompts greedily; a reply that did not end lacks the end-of-turn token."""
    encoded = [coder.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    width = max(len(ids) for ids in encoded)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in encoded])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
    made = net.generate(input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False)
    replies = []
    for row in made[:, width:].tolist():
        stop = row.index(net.config.eos_token_id) + 1 if net.config.eos_token_id in row else len(row)
        replies.append(coder.decode(row[:stop], skip_special_tokens=False))
    return replies


def _batches(turns: list[Turn], size: int = 32) -> Iterable[list[Turn]]:
    ordered = sorted(turns, key=lambda turn: len(turn.prompt))
    return (ordered[i : i + size] for i in range(0, len(ordered), size))


def evaluate_kind(net: Any, coder: Tokenizer, kind: str, count: int, seed: int) -> Score:
    """Ask held-out questions of one kind."""
    rng = random.Random(f"held-out-{kind}-{seed}")
    turns = [turn for i in range(count) for turn in turns_of(held_out(rng, kind), i)]
    score, failed = Score(asked=count, turns=len(turns)), set()
    for batch in _batches(turns):
        for turn, reply in zip(batch, greedy(net, coder, [turn.prompt for turn in batch]), strict=True):
            score.ended += reply.endswith(END)
            if not is_right(turn, reply):
                failed.add(turn.question)
                wanted = str(turn.wanted.get("tool_calls") or turn.wanted["content"])
                score.wrong.append((turn.prompt, wanted, reply))
    score.right = count - len(failed)
    return score


def evaluate(folder: Path, count: int, *, seed: int = 0, kinds: Iterable[str] = KINDS) -> dict[str, Score]:
    """Load a finished model as it is shipped and evaluate every kind."""
    net: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    net.eval()
    net.generation_config.eos_token_id = net.config.eos_token_id
    coder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {kind: evaluate_kind(net, coder, kind, count, seed) for kind in kinds}


def table(scores: dict[str, Score]) -> str:
    """Write the result as a table, the rate over all kinds last."""
    lines = ["| kind | questions | right | rate | turns ended |", "| --- | ---: | ---: | ---: | ---: |"]
    whole = Score()
    for kind, score in scores.items():
        lines.append(_line(kind, score))
        whole.asked += score.asked
        whole.right += score.right
        whole.ended += score.ended
        whole.turns += score.turns
    return "\n".join([*lines, _line("all", whole)])


def _line(kind: str, score: Score) -> str:
    share = score.right / score.asked
    return f"| {kind} | {score.asked} | {score.right} | {share:.1%} | {score.ended}/{score.turns} |"


def main() -> None:
    """Evaluate a folder from the command line."""
    parser = argparse.ArgumentParser(description="Evaluate pocket on held-out questions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=tuple(KINDS))
    parser.add_argument("--show", type=int, default=0, help="wrong answers to show for each kind")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    scores = evaluate(
        arguments.folder, arguments.questions, seed=arguments.seed, kinds=arguments.kind or KINDS
    )
    for kind, score in scores.items():
        for prompt, wanted, reply in score.wrong[: arguments.show]:
            sys.stdout.write(f"--- {kind}\n{prompt[-300:]}\nwanted: {wanted}\nreply:  {reply}\n")
    sys.stdout.write(table(scores) + "\n")


if __name__ == "__main__":
    main()
