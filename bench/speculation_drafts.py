"""What a draft model brings at batch 1 on the cpu device, by how often its drafts are right.

    python -m bench.speculation_drafts [--layers 12] [--hidden 1024] [--tokens 120] [--rounds 5]

The target is a random Llama whose layers behind the first add little, and the draft model is its first layer
with the same embedding and head. How little they add decides how many drafts are right, as the quality of a
draft model does. Two engines answer in turns, one of them without drafts; the CPU time of server and rank is
less changed by others on the machine than seconds are. The bound is 1.3 times where 60 % are right.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import anyio
import torch
from msgspec import structs
from transformers import LlamaConfig, LlamaForCausalLM

from bench.record import record
from bench.speculation import compare
from runtime import Engine
from tests.models.make import VOCAB_SIZE, write_tokenizer

DRAFTS = 4


def checkpoints(folder: Path, layers: int, hidden: int, weight: float) -> tuple[Path, Path]:
    """A target, and the draft model that is its first layer. `weight`: of what the other layers add."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 2048,
        "eos_token_id": 258,
    }
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes)).to(torch.bfloat16)
    draft = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, hidden**-0.5)
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(weight)
            layer.mlp.down_proj.weight.mul_(weight)
    draft.load_state_dict(target.state_dict(), strict=False)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        write_tokenizer(folder / name)
    return folder / "target", folder / "draft"


async def serving(given: argparse.Namespace, weight: float) -> dict[str, Any]:
    """One weight of the other layers."""
    with tempfile.TemporaryDirectory() as place:
        target, draft = checkpoints(Path(place), given.layers, given.hidden, weight)
        common: dict[str, Any] = {
            "model_path": str(target),
            "num_threads": 1,
            "disable_radix_cache": True,
            "max_total_tokens": 4096,
        }
        drafts: dict[str, Any] = {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": str(draft),
            "speculative_num_steps": DRAFTS,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": DRAFTS + 1,
        }
        async with Engine(**common) as plain, Engine(**common, **drafts) as drafted:
            turns = [[f"{i} is a number"] for i in range(given.rounds)]
            await compare([plain, drafted], turns[:1], 20)
            scheduler = drafted._core.replicas[0].scheduler
            assert scheduler is not None
            before = structs.replace(scheduler.totals)
            found: dict[str, Any] = await compare([plain, drafted], turns, given.tokens)
            drafts_made = scheduler.totals.drafted_tokens - before.drafted_tokens
            found["accepted"] = round(
                (scheduler.totals.accepted_drafts - before.accepted_drafts) / drafts_made, 2
            )
    found = {name.replace("_ngram", "_drafted"): value for name, value in found.items()}
    return found


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 0.05, 0.1, 0.2])
    given = parser.parse_args()
    results = {}
    for weight in given.weights:
        results[f"others add {weight}"] = anyio.run(serving, given, weight)
        print(weight, results[f"others add {weight}"], flush=True)
    print(record("speculation_drafts", results))


if __name__ == "__main__":
    main()
