"""What transformers says: greedy continuations and log probabilities, in fp32."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Reference:
    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """With the model's own cache, one token at a time; no generation config is in the way."""
        with torch.inference_mode():
            out = self.model(torch.tensor([prompt]), use_cache=True)
            tokens = [int(out.logits[0, -1].argmax())]
            # models without attention have another name for it
            name = "past_key_values" if hasattr(out, "past_key_values") else "cache_params"
            while len(tokens) < num_tokens:
                cache = {name: getattr(out, name)}
                if name == "past_key_values":  # Bamba counts positions from the first token that it is given
                    cache["position_ids"] = torch.tensor([[len(prompt) + len(tokens) - 1]])
                out = self.model(torch.tensor([tokens[-1:]]), use_cache=True, **cache)
                tokens.append(int(out.logits[0, -1].argmax()))
        return tokens

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), V]: row i is of the token after tokens[: i + 1]."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
