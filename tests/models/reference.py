"""What transformers says: greedy continuations and log probabilities, in fp32."""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

# from 5.24 on, before that, and of models without attention before that
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_of(out: Any) -> dict[str, Any]:
    """The cache of an output, by the name that a model of this version of transformers takes it under."""
    name = next(name for name in CACHE_NAMES if getattr(out, name, None) is not None)
    return {name: getattr(out, name)}


class Reference:
    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """With the model's own cache, one token at a time; no generation config is in the way."""
        with torch.inference_mode():
            out = self.model(torch.tensor([prompt]), use_cache=True)
            tokens = [int(out.logits[0, -1].argmax())]
            while len(tokens) < num_tokens:
                given = cache_of(out)
                # Bamba counts positions from the first token that it is given
                if "position_ids" in signature(self.model.forward).parameters:
                    given["position_ids"] = torch.tensor([[len(prompt) + len(tokens) - 1]])
                out = self.model(torch.tensor([tokens[-1:]]), use_cache=True, **given)
                tokens.append(int(out.logits[0, -1].argmax()))
        return tokens

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), V]: row i is of the token after tokens[: i + 1]."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
