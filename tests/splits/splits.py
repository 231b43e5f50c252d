"""The rows of the table of docs/parallelism.md: ways to divide a model, and what they are tried with.

A split is its options; a new way to divide a model is a row more.
"""

from typing import Any

from tests.models.make import FAMILIES as MADE

Options = dict[str, Any]

TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
EP2 = {"expert_parallel_size": 2}
DP2 = {"data_parallel_size": 2, "load_balance_method": "round_robin"}
NODES = {"nnodes": 2}

SPLITS: dict[str, Options] = {
    "one rank": {},
    "--tp-size 2": TP2,
    "--tp-size 3": {"tensor_parallel_size": 3},
    "--tp-size 4": {"tensor_parallel_size": 4},
    "--tp-size 2 --ep-size 2": TP2 | EP2,
    "--tp-size 4 --ep-size 2": {"tensor_parallel_size": 4} | EP2,
    "--tp-size 2 --moe-a2a-backend deepep": TP2 | {"moe_a2a_backend": "deepep"},
    "--pp-size 2": PP2,
    "--pp-size 3": {"pipeline_parallel_size": 3},
    "--tp-size 2 --enable-two-batch-overlap": TP2 | {"enable_two_batch_overlap": True},
    "--tp-size 2 --enable-attn-tp-input-scattered": TP2 | {"enable_attn_tp_input_scattered": True},
    "--tp-size 2 --attn-cp-size 2": TP2 | {"attention_context_parallel_size": 2},
    "--tp-size 2 --pp-size 2": TP2 | PP2,
    "--tp-size 2 --ep-size 2 --pp-size 2": TP2 | EP2 | PP2,
    "--tp-size 2 --pp-size 2 --enable-two-batch-overlap": TP2 | PP2 | {"enable_two_batch_overlap": True},
    "--tp-size 2 --attn-cp-size 2 --enable-two-batch-overlap": TP2
    | {"attention_context_parallel_size": 2, "enable_two_batch_overlap": True},
    "--tp-size 2 --attn-cp-size 2 --pp-size 2": TP2 | PP2 | {"attention_context_parallel_size": 2},
    "--dp-size 2": DP2,
    "--tp-size 2 --dp-size 2": TP2 | DP2,
    "--pp-size 2 --dp-size 2": PP2 | DP2,
    "--tp-size 2 --dp-size 2 --enable-dp-attention": TP2 | DP2 | {"enable_dp_attention": True},
    "--tp-size 2 --dp-size 2 --enable-dp-attention --enable-two-batch-overlap": TP2
    | DP2
    | {"enable_dp_attention": True, "enable_two_batch_overlap": True},
    "--tp-size 2 --pp-size 2 --dp-size 2 --enable-dp-attention": TP2
    | PP2
    | DP2
    | {"enable_dp_attention": True},
    "--tp-size 2 --nnodes 2": TP2 | NODES,
    "--tp-size 2 --ep-size 2 --nnodes 2": TP2 | EP2 | NODES,
    "--tp-size 2 --attn-cp-size 2 --nnodes 2": TP2 | NODES | {"attention_context_parallel_size": 2},
    "--pp-size 2 --nnodes 2": PP2 | NODES,
    "--dp-size 2 --nnodes 2": DP2 | NODES,
    "--tp-size 2 --dp-size 2 --nnodes 2": TP2 | DP2 | NODES,
    "--tp-size 2 --dp-size 2 --nnodes 4": TP2 | DP2 | {"nnodes": 4},
    "--tp-size 2 --dp-size 2 --enable-dp-attention --nnodes 2": TP2
    | DP2
    | NODES
    | {"enable_dp_attention": True},
}

# columns on the cpu -> (family of make.py, sizes that differ from its own): enough layers for three stages
FAMILIES: dict[str, tuple[str, Options]] = {
    "Llama": ("llama", {"num_hidden_layers": 4}),
    "Gemma 2": (
        "gemma2",
        {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "Qwen3-MoE": ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0]}),
    "DeepSeek V3": ("deepseek_v3", {"num_hidden_layers": 4}),
    "Jamba": ("jamba", {}),
}
assert all(family in MADE for family, _ in FAMILIES.values())


def num_ranks(options: Options) -> int:
    """Processes of all replicas of a split."""
    count: int = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    return count if options.get("enable_dp_attention") else count * options.get("data_parallel_size", 1)
