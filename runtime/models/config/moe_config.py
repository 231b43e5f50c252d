"""Mixture of experts (MoE) in config.json: which layers have experts, how many, and how tokens are routed.
Torch-free. moe_families.py reads these facts, which families name differently.
"""

from typing import Annotated as A
from typing import Literal

from msgspec import Meta, Struct

from runtime.models.config.sizes import Experts, Layers, Width

Count = A[int, Meta(gt=0, le=2**31 - 1)]
Whole = A[int, Meta(ge=0, le=2**31 - 1)]
Score = Literal["softmax", "sigmoid", "sparsemixer"]


class Routing(Struct, frozen=True, kw_only=True):
    """How the router scores of a token become experts and their weights (see Experts.route in
    devices/base.py)."""

    top_k: int  # experts of a token
    score: Score = "softmax"
    jitter: float = 0.0  # of sparsemixer, see layers/moe/routing.py
    num_groups: int = 1  # groups of experts
    top_groups: int = 1  # groups that a token's experts may belong to
    group_score: Literal["largest", "two largest"] = "largest"  # the scores in a group whose sum ranks it
    normalizes: bool = False  # the weights of a token's experts are divided by their sum
    scale: float = 1.0  # factor on the weights
    scales_inputs: bool = False  # the weights multiply what experts are given, not what they return


class MoeConfig(Struct, frozen=True, kw_only=True):
    """The experts of a model."""

    num_experts: int
    intermediate_size: int  # of one expert
    shared_size: int = 0  # intermediate size of the shared experts together; 0: there are none
    has_shared_gate: bool = False  # the shared expert has a gate: a weight for each token
    has_bias: bool = False  # a correction bias on the scores that select experts; it is not in their weights
    layers: tuple[bool, ...]  # whether each layer has experts
    routing: Routing
    is_stacked: bool = False  # the checkpoint has all experts of a layer in one tensor, with biases
    is_transposed: bool = False  # stacked experts of the checkpoint are [experts, inputs, outputs]
    is_gated: bool = True  # experts have a gate
    latent_size: int | None = None  # width of what experts are given and return; None: that of the model
    dense_size: int | None = None  # intermediate size of layers without experts; None: intermediate_size
    # of each layer: clamp of the experts' activation (layers/feed_forward.py), 0: none; empty: none anywhere
    limits: tuple[float, ...] = ()
    num_zero: int = 0  # further experts that a router may choose, which return what they are given
    # experts stand beside a dense feed-forward, and what they return is added behind the next layer
    is_shortcut: bool = False

    @property
    def is_on_all_ranks(self) -> bool:
        """Whether ranks split each expert, and the device's grouped products are not used in some layers."""
        return self.is_stacked or not self.is_gated or any(self.limits) or self.is_shortcut

    def limit_of(self, index: int) -> float:
        """Clamp of the activation of a layer's experts; 0: none."""
        return self.limits[index] if self.limits else 0.0


class HfMoeConfig(Struct, frozen=True, kw_only=True):
    """The part of config.json that is read here."""

    num_hidden_layers: Layers
    num_experts: Experts | list[Experts] | None = None
    num_local_experts: Experts | None = None
    n_routed_experts: Experts | None = None
    moe_num_experts: Experts | None = None
    num_experts_per_tok: Experts | None = None
    moe_k: Experts | None = None
    moe_topk: Experts | list[Experts] | None = None
    zero_expert_num: Whole | None = None
    moe_intermediate_size: Width | list[Width] | None = None
    intermediate_size: Width | None = None
    intermediate_size_mlp: Width | None = None
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    norm_topk_prob: bool | None = None
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None
    mlp_layer_types: list[str] | None = None
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: Whole = 1
    first_k_dense_replace: Whole | None = None
    moe_layer_freq: Count = 1
    moe_layer_start_index: Whole = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: Count = 1
    shared_expert_intermediate_size: Whole = 0
    shared_intermediate_size: Whole = 0
    n_shared_experts: Whole | None = None
    num_shared_experts: Whole = 0
    moe_num_shared_experts: Whole = 0
    n_group: Experts | None = None
    topk_group: Experts | None = None
    topk_method: str | None = None
    scoring_func: str | None = None
    routed_scaling_factor: float = 1.0
    router_jitter_noise: float = 0.0
    expert_layer_period: Count = 2
    expert_layer_offset: Whole = 1
    use_expert_bias: bool = True
    swiglu_limits: list[A[float, Meta(ge=0)] | None] | None = None
    use_moe_router_bias: bool = True
    moe_latent_size: Width | None = None
    moe_shared_expert_intermediate_size: Whole = 0
