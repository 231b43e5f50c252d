"""Mixture of experts (MoE) in config.json: which layers have experts, how many, and how tokens are routed.
Torch-free.

Families name the same facts differently, so each has a reader here, which its row in registry.py names.
"""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.models.config.sizes import Experts, Layers, Width

Count = A[int, Meta(gt=0, le=2**31 - 1)]
Whole = A[int, Meta(ge=0, le=2**31 - 1)]


class Routing(Struct, frozen=True, kw_only=True):
    """How the router scores of a token become experts and their weights (see Experts.route in
    devices/base.py)."""

    top_k: int  # experts of a token
    score: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1  # groups of experts
    top_groups: int = 1  # groups that a token's experts may belong to
    group_score: Literal["largest", "two largest"] = "largest"  # the scores in a group whose sum ranks it
    normalizes: bool = False  # the weights of a token's experts are divided by their sum
    scale: float = 1.0  # factor on the weights


class MoeConfig(Struct, frozen=True, kw_only=True):
    """The experts of a model."""

    num_experts: int
    intermediate_size: int  # of one expert
    shared_size: int  # intermediate size of the shared experts together; 0: there are none
    has_shared_gate: bool  # the shared expert has a gate: a weight for each token
    has_bias: bool  # a correction bias on the scores that select experts; it is not in their weights
    layers: tuple[bool, ...]  # whether each layer has experts
    routing: Routing
    is_stacked: bool = False  # the checkpoint has all experts of a layer in one tensor, with biases


class HfMoeConfig(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here."""

    num_hidden_layers: Layers
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    n_routed_experts: Experts | None = None
    num_experts_per_tok: Experts | None = None
    moe_intermediate_size: Width | None = None
    intermediate_size: Width | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None
    shared_expert_intermediate_size: Whole = 0
    n_shared_experts: Whole | None = None
    first_k_dense_replace: Whole | None = None
    moe_layer_freq: Count = 1
    n_group: Experts | None = None
    topk_group: Experts | None = None
    topk_method: str | None = None
    scoring_func: str | None = None
    routed_scaling_factor: float = 1.0


def _sizes(hf: HfMoeConfig) -> tuple[int, int, int]:
    """Number of experts, experts of a token, intermediate size. Raises ModelError."""
    num_experts = hf.num_experts or hf.num_local_experts or hf.n_routed_experts
    if num_experts is None or hf.num_experts_per_tok is None or hf.moe_intermediate_size is None:
        raise ModelError(
            "config.json lacks the number of experts, num_experts_per_tok or moe_intermediate_size; "
            "restore the file from the model's source"
        )
    if hf.num_experts_per_tok > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok {hf.num_experts_per_tok} is more than the {num_experts} "
            "experts"
        )
    return num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size


def _qwen(hf: HfMoeConfig, has_shared: bool) -> MoeConfig:
    num_experts, top_k, inner = _sizes(hf)
    dense = set(hf.mlp_only_layers or ())
    layers = tuple(
        i not in dense and (i + 1) % hf.decoder_sparse_step == 0 for i in range(hf.num_hidden_layers)
    )
    shared = hf.shared_expert_intermediate_size if has_shared else 0
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        shared_size=shared,
        has_shared_gate=shared > 0,
        has_bias=False,
        layers=layers,
        routing=Routing(top_k=top_k, normalizes=bool(hf.norm_topk_prob)),
    )


def qwen2(hf: HfMoeConfig) -> MoeConfig:
    """Qwen2-MoE: a shared expert with a gate of its own."""
    return _qwen(hf, True)


def qwen3(hf: HfMoeConfig) -> MoeConfig:
    """Qwen3-MoE: no shared expert."""
    return _qwen(hf, False)


def _deepseek(
    hf: HfMoeConfig, score: Literal["softmax", "sigmoid"], grouped: bool, normalizes: bool
) -> MoeConfig:
    num_experts, top_k, inner = _sizes(hf)
    groups, top_groups = (hf.n_group or 1, hf.topk_group or 1) if grouped else (1, 1)
    if num_experts % groups or top_groups > groups or top_k > num_experts // groups * top_groups:
        raise ModelError(
            f"config.json: {num_experts} experts in {groups} groups (n_group), of which topk_group "
            f"{top_groups} are chosen, "
            f"do not give num_experts_per_tok {top_k}"
        )
    if score == "sigmoid" and num_experts < 2 * groups:
        raise ModelError(
            f"config.json: n_group {groups} leaves less than two of {num_experts} experts in a group"
        )
    if hf.moe_layer_freq != 1 or hf.scoring_func not in (None, score):
        raise ModelError(
            f"config.json: moe_layer_freq {hf.moe_layer_freq} with scoring_func {hf.scoring_func} is not "
            "supported; "
            f"supported is 1 with {score}"
        )
    is_v3 = score == "sigmoid"
    routing = Routing(
        top_k=top_k,
        score=score,
        num_groups=groups,
        top_groups=top_groups,
        normalizes=normalizes,
        group_score="two largest" if is_v3 else "largest",
        scale=hf.routed_scaling_factor,
    )
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        shared_size=inner * (hf.n_shared_experts or 0),
        has_shared_gate=False,
        has_bias=is_v3,
        layers=tuple(i >= (hf.first_k_dense_replace or 0) for i in range(hf.num_hidden_layers)),
        routing=routing,
    )


def deepseek2(hf: HfMoeConfig) -> MoeConfig:
    """DeepSeek V2: softmax scores, with or without expert groups. Raises ModelError for other routing."""
    if hf.topk_method not in (None, "greedy", "group_limited_greedy") or hf.norm_topk_prob:
        raise ModelError(
            f"config.json: topk_method {hf.topk_method} with norm_topk_prob {hf.norm_topk_prob} is not "
            "supported in this "
            "family; supported are greedy and group_limited_greedy, without it"
        )
    return _deepseek(hf, "softmax", hf.topk_method == "group_limited_greedy", False)


def deepseek3(hf: HfMoeConfig) -> MoeConfig:
    """DeepSeek V3 and R1: sigmoid scores with a correction bias, within expert groups. Raises ModelError for
    other routing."""
    if hf.topk_method not in (None, "noaux_tc"):
        raise ModelError(
            f"config.json: topk_method {hf.topk_method} is not supported in this family; supported is "
            "noaux_tc"
        )
    return _deepseek(hf, "sigmoid", True, hf.norm_topk_prob is not False)


def gpt_oss(hf: HfMoeConfig) -> MoeConfig:
    """gpt-oss: stacked experts in every layer. Raises ModelError for other constants of the activation."""
    num_experts, top_k, inner = hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size
    if num_experts is None or top_k is None or inner is None or top_k > num_experts:
        raise ModelError(
            "config.json lacks num_local_experts, num_experts_per_tok or intermediate_size; "
            "restore the file from the model's source"
        )
    if (hf.swiglu_alpha, hf.swiglu_limit) != (1.702, 7.0):
        raise ModelError(
            f"config.json: swiglu_alpha {hf.swiglu_alpha} with swiglu_limit {hf.swiglu_limit} is not "
            "supported; "
            "supported is 1.702 with 7"
        )
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        shared_size=0,
        has_shared_gate=False,
        has_bias=False,
        layers=(True,) * hf.num_hidden_layers,
        routing=Routing(top_k=top_k, normalizes=True),
        is_stacked=True,
    )
