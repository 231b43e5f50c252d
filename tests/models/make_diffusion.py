"""Tiny random checkpoints of diffusion models, and what they answer by transformers' modules.

Their layers are those of families that transformers has: SDAR's are Qwen 3's, those of LLaDA 2 are GLM
4.5's under other names. The reference computes all tokens up to the end of a block anew in each step, by a
mask.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.make import make_checkpoint

MASK = 257
SHARPNESS = 4.0  # factor on logits: some tokens are likely, as in trained models
SIZES = {"sdar": 4, "sdar_moe": 4, "llada2": 8}
ARCHITECTURES = {"sdar": "SDARForCausalLM", "sdar_moe": "SDARMoeForCausalLM", "llada2": "LLaDA2MoeModelLM"}
TWINS = {"sdar": "qwen3", "sdar_moe": "qwen3_moe", "llada2": "glm4_moe"}
OVERRIDES: dict[str, dict[str, Any]] = {"llada2": {"n_group": 4, "topk_group": 2}}
# names of transformers' twin -> those of LLaDA 2's checkpoints
NAMES = (
    ("model.embed_tokens.", "model.word_embeddings."),
    (".self_attn.q_norm.", ".attention.query_layernorm."),
    (".self_attn.k_norm.", ".attention.key_layernorm."),
    (".self_attn.o_proj.", ".attention.dense."),
    (".gate.e_score_correction_bias", ".gate.expert_bias"),
)


def make_diffusion(kind: str, folder: Path) -> Path:
    """The checkpoint in `folder`/model, and its twin for transformers in `folder`/twin."""
    twin, own = (
        make_checkpoint(TWINS[kind], folder / name, **OVERRIDES.get(kind, {})) for name in ("twin", "model")
    )
    weights = load_file(twin / "model.safetensors")
    weights["lm_head.weight"] *= SHARPNESS
    save_file(weights, twin / "model.safetensors", {"format": "pt"})
    config = json.loads((twin / "config.json").read_text())
    config |= {"architectures": [ARCHITECTURES[kind]], "block_size": SIZES[kind], "mask_token_id": MASK}
    if kind == "llada2":
        config |= {"num_experts": config.pop("n_routed_experts")}
        config |= {"num_shared_experts": config.pop("n_shared_experts")}
        weights = _renamed(weights)
    save_file(weights, own / "model.safetensors")
    config["model_type"] = kind
    (own / "config.json").write_text(json.dumps(config))
    return own


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of GLM 4.5 as LLaDA 2 has them: other names, and projections to heads in one."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if ".self_attn.q_proj." in name:
            parts = [weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            for theirs, ours in NAMES:
                name = name.replace(theirs, ours)
            found[name] = weight
    return found


class BlockReference:
    """What a diffusion model answers, greedily: each step computes all tokens, and nothing is cached."""

    def __init__(self, folder: Path, size: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder.parent / "twin", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.size = size

    def probabilities(self, tokens: list[int], penalty: float = 0.0) -> Tensor:
        """float32 [size, V]: at the places of the last block, without the mask."""
        blocks = torch.arange(len(tokens)) // self.size
        hidden = torch.where(blocks[None] <= blocks[:, None], 0.0, -torch.inf)[None, None]
        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens]), attention_mask=hidden).logits[0, -self.size :]
        logits = logits.clone()
        for place in range(1, self.size):
            logits[place, tokens[place - self.size - 1]] -= penalty
        logits[:, MASK] = -torch.inf
        return logits.softmax(-1)

    def low_confidence(self, prompt: list[int], count: int, threshold: float) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens += [MASK] * (self.size - len(tokens) % self.size)
            while MASK in tokens:
                found = self.probabilities(tokens).max(-1)
                first = len(tokens) - self.size
                masked = [place for place in range(self.size) if tokens[first + place] == MASK]
                sure = [place for place in masked if found.values[place] > threshold]
                if not sure:
                    sure = [masked[int(found.values[masked].argmax())]]
                for place in sure:
                    tokens[first + place] = int(found.indices[place])
        return tokens[len(prompt) :][:count]

    def joint(
        self, prompt: list[int], count: int, threshold: float, edit: float, most_edits: int, penalty: float
    ) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            given = len(tokens) % self.size
            tokens += [MASK] * (self.size - given)
            first, edits = len(tokens) - self.size, 0
            while True:
                block = torch.tensor(tokens[first:])
                likely, found = self.probabilities(tokens, penalty).max(-1)
                is_mask = block == MASK
                if not is_mask.any():
                    edits += 1
                    if edits > most_edits:
                        break
                change = is_mask & (likely > threshold)
                if is_mask.any() and not change.any():
                    change[torch.where(is_mask, likely, -1.0).argmax()] = True
                is_own = torch.arange(self.size) >= given
                change |= ~is_mask & is_own & (found != block) & (likely > edit)
                if not change.any():
                    break
                tokens[first:] = torch.where(change, found, block).tolist()
        return tokens[len(prompt) :][:count]
