"""Variants of tiny checkpoints whose weights are counted."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "one kv head": {"num_key_value_heads": 1},
}
# of a family in a variant, or in all of them
OTHERWISE: dict[tuple[str, str], dict[str, Any]] = {
    ("internlm3", "biased"): {"mlp_bias": True},  # transformers has all biases of it or none
    ("kimi_linear", "biased"): {"q_lora_rank": 24},  # queries of a latent alone have a bias
    # else its keys have low-rank products of all heads
    ("zamba2", "one kv head"): {"use_shared_attention_adapter": False},
    ("longcat", ""): {"zero_expert_num": 0},  # transformers writes weights of experts that have none
    ("dbrx", ""): {"tie_word_embeddings": False},  # transformers ties none of it
}
