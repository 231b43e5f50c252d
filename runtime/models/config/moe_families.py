"""Readers of the experts in config.json (moe_config.py), one for each way in which families spell them.
Torch-free. Rows of registry.py name them.

Every reader raises ModelError where numbers are missing, contradict each other or ask for routing that is not
supported.
"""

from msgspec import structs

from runtime.errors import ModelError
from runtime.models.config.moe_config import HfMoeConfig, MoeConfig, Routing, Score


def _one(value: int | list[int] | None, name: str) -> int | None:
    """A number that config.json may have once for each layer."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ModelError(f"config.json: {name} differs between layers, which is not supported")
    return value[0]


def _sizes(hf: HfMoeConfig, inner: int | None) -> tuple[int, int, int]:
    """Number of experts, experts of a token, intermediate size of an expert."""
    num_experts = (
        _one(hf.num_experts, "num_experts")
        or hf.num_local_experts
        or hf.n_routed_experts
        or hf.moe_num_experts
    )
    top_k = hf.num_experts_per_tok or hf.moe_k or _one(hf.moe_topk, "moe_topk")
    if num_experts is None or top_k is None or inner is None:
        raise ModelError(
            "config.json lacks the number of experts (num_experts, num_local_experts, n_routed_experts or "
            "moe_num_experts), the number of experts of a token (num_experts_per_tok, num_experts_per_token, "
            "moe_k or moe_topk) or "
            "their intermediate size (moe_intermediate_size or intermediate_size); restore the file from the "
            "model's source"
        )
    if top_k > num_experts:
        raise ModelError(f"config.json: num_experts_per_tok {top_k} is more than the {num_experts} experts")
    return num_experts, top_k, inner


def _inner(hf: HfMoeConfig) -> int | None:
    return _one(hf.moe_intermediate_size, "moe_intermediate_size")


def _all_layers(hf: HfMoeConfig) -> tuple[bool, ...]:
    return (True,) * hf.num_hidden_layers


def _softmax(hf: HfMoeConfig, *, normalizes: bool, shared_size: int = 0) -> MoeConfig:
    """Experts in every layer, with the model's intermediate size, chosen by softmax."""
    num_experts, top_k, inner = _sizes(hf, hf.intermediate_size)
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        shared_size=shared_size,
        layers=_all_layers(hf),
        routing=Routing(top_k=top_k, normalizes=normalizes),
    )


def mixtral(hf: HfMoeConfig) -> MoeConfig:
    """Mixtral: weights by softmax over the experts of a token, which is normalized softmax over all."""
    return _softmax(hf, normalizes=True)


def olmoe(hf: HfMoeConfig) -> MoeConfig:
    """OLMoE and Flex-OLMo."""
    return _softmax(hf, normalizes=bool(hf.norm_topk_prob))


def granite(hf: HfMoeConfig) -> MoeConfig:
    """Granite MoE, with a shared expert or without."""
    return _softmax(hf, normalizes=True, shared_size=hf.shared_intermediate_size)


def granite_hybrid(hf: HfMoeConfig) -> MoeConfig | None:
    """Granite 4: experts, or none."""
    return None if hf.num_local_experts is None else granite(hf)


def jamba(hf: HfMoeConfig) -> MoeConfig | None:
    """Jamba: experts in every so many layers; one expert is none."""
    if hf.num_experts == 1:
        return None
    period, offset = hf.expert_layer_period, hf.expert_layer_offset
    layers = tuple(i % period == offset for i in range(hf.num_hidden_layers))
    return structs.replace(_softmax(hf, normalizes=False), layers=layers)


def hunyuan(hf: HfMoeConfig) -> MoeConfig:
    """Hunyuan MoE: a shared expert of the same size."""
    return _softmax(hf, normalizes=True, shared_size=hf.intermediate_size or 0)


def phi(hf: HfMoeConfig) -> MoeConfig:
    """Phi-MoE: two experts by sparsemixer."""
    num_experts, top_k, inner = _sizes(hf, hf.intermediate_size)
    if top_k != 2 or num_experts < 2:
        raise ModelError(
            f"config.json: num_experts_per_tok {top_k} is not supported in this family; supported is 2"
        )
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        layers=_all_layers(hf),
        routing=Routing(top_k=2, score="sparsemixer", jitter=hf.router_jitter_noise),
    )


def minimax(hf: HfMoeConfig) -> MoeConfig:
    """MiniMax-M2: sigmoid scores with a correction bias."""
    num_experts, top_k, inner = _sizes(hf, hf.intermediate_size)
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        has_bias=True,
        layers=_all_layers(hf),
        routing=Routing(top_k=top_k, score="sigmoid", normalizes=True),
    )


def ernie(hf: HfMoeConfig) -> MoeConfig:
    """Ernie 4.5: softmax scores with a correction bias, and experts in every `moe_layer_interval`-th layer
    of a range."""
    num_experts, top_k, inner = _sizes(hf, _inner(hf))
    count = hf.num_hidden_layers
    last = count - 1 if hf.moe_layer_end_index == -1 else hf.moe_layer_end_index
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        shared_size=inner * hf.moe_num_shared_experts,
        has_bias=True,
        layers=tuple(
            (i + 1) % hf.moe_layer_interval == 0 and hf.moe_layer_start_index <= i <= last
            for i in range(count)
        ),
        routing=Routing(top_k=top_k, normalizes=True),
    )


def llama4(hf: HfMoeConfig) -> MoeConfig:
    """Llama 4: sigmoid scores multiply what experts are given; one shared expert."""
    num_experts, top_k, inner = _sizes(hf, hf.intermediate_size)
    if top_k != 1:
        raise ModelError(
            f"config.json: num_experts_per_tok {top_k} is not supported in this family; supported is 1"
        )
    if hf.moe_layers is not None:
        chosen = set(hf.moe_layers)
        layers = tuple(i in chosen for i in range(hf.num_hidden_layers))
    else:
        step = hf.interleave_moe_layer_step
        layers = tuple(step > 0 and (i + 1) % step == 0 for i in range(hf.num_hidden_layers))
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        shared_size=inner,
        layers=layers,
        routing=Routing(top_k=top_k, score="sigmoid", scales_inputs=True),
        is_transposed=True,
        dense_size=hf.intermediate_size_mlp,
    )


def _qwen(hf: HfMoeConfig, has_shared: bool) -> MoeConfig:
    num_experts, top_k, inner = _sizes(hf, _inner(hf))
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
        layers=layers,
        routing=Routing(top_k=top_k, normalizes=bool(hf.norm_topk_prob)),
    )


def qwen2(hf: HfMoeConfig) -> MoeConfig:
    """Qwen2-MoE: a shared expert with a gate of its own."""
    return _qwen(hf, True)


def qwen3(hf: HfMoeConfig) -> MoeConfig:
    """Qwen3-MoE: no shared expert."""
    return _qwen(hf, False)


def mellum(hf: HfMoeConfig) -> MoeConfig:
    """Mellum: as Qwen3-MoE, in layers that mlp_layer_types names."""
    return structs.replace(qwen3(hf), layers=_sparse_layers(hf, 0))


def qwen3_vl(hf: HfMoeConfig) -> MoeConfig:
    """Qwen3-VL-MoE: weights are normalized whatever config.json says; stacks have inputs before outputs."""
    return structs.replace(qwen3(structs.replace(hf, norm_topk_prob=True)), is_transposed=True)


def _groups(hf: HfMoeConfig, score: Score, num_experts: int, top_k: int) -> tuple[int, int]:
    """Groups of experts, and groups of a token."""
    groups, top_groups = hf.n_group or 1, hf.topk_group or 1
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
    return groups, top_groups


def _sparse_layers(hf: HfMoeConfig, num_dense: int) -> tuple[bool, ...]:
    """Layers with experts: those that mlp_layer_types names, else all behind the first ones. `num_dense`: how
    many these are without first_k_dense_replace."""
    count = hf.num_hidden_layers
    if hf.mlp_layer_types is not None:
        if len(hf.mlp_layer_types) != count or set(hf.mlp_layer_types) - {"dense", "sparse"}:
            raise ModelError(
                f"config.json: mlp_layer_types must name dense or sparse for each of the {count} layers"
            )
        return tuple(kind == "sparse" for kind in hf.mlp_layer_types)
    first = num_dense if hf.first_k_dense_replace is None else hf.first_k_dense_replace
    return tuple(i >= first for i in range(count))


def _deepseek(
    hf: HfMoeConfig, score: Score, *, has_groups: bool, normalizes: bool, num_dense: int = 0
) -> MoeConfig:
    num_experts, top_k, inner = _sizes(hf, _inner(hf))
    groups, top_groups = _groups(hf, score, num_experts, top_k) if has_groups else (1, 1)
    if hf.moe_layer_freq != 1 or hf.scoring_func not in (None, score):
        raise ModelError(
            f"config.json: moe_layer_freq {hf.moe_layer_freq} with scoring_func {hf.scoring_func} is not "
            "supported; "
            f"supported is 1 with {score}"
        )
    is_v3 = score == "sigmoid"
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        shared_size=inner * (hf.n_shared_experts or hf.num_shared_experts),
        has_bias=is_v3,
        layers=_sparse_layers(hf, num_dense),
        routing=Routing(
            top_k=top_k,
            score=score,
            num_groups=groups,
            top_groups=top_groups,
            normalizes=normalizes,
            group_score="two largest" if is_v3 else "largest",
            scale=hf.routed_scaling_factor,
        ),
    )


def deepseek2(hf: HfMoeConfig) -> MoeConfig:
    """DeepSeek V2: softmax scores, with or without expert groups."""
    if hf.topk_method not in (None, "greedy", "group_limited_greedy") or hf.norm_topk_prob:
        raise ModelError(
            f"config.json: topk_method {hf.topk_method} with norm_topk_prob {hf.norm_topk_prob} is not "
            "supported in this "
            "family; supported are greedy and group_limited_greedy, without it"
        )
    return _deepseek(hf, "softmax", has_groups=hf.topk_method == "group_limited_greedy", normalizes=False)


def mistral4(hf: HfMoeConfig) -> MoeConfig:
    """Mistral 4: softmax scores, normalized, within groups that their two largest scores rank."""
    moe = _deepseek(hf, "softmax", has_groups=True, normalizes=hf.norm_topk_prob is not False)
    return structs.replace(moe, routing=structs.replace(moe.routing, group_score="two largest"))


def deepseek3(hf: HfMoeConfig) -> MoeConfig:
    """DeepSeek V3 and R1: sigmoid scores with a correction bias, within expert groups."""
    if hf.topk_method not in (None, "noaux_tc"):
        raise ModelError(
            f"config.json: topk_method {hf.topk_method} is not supported in this family; supported is "
            "noaux_tc"
        )
    return _deepseek(hf, "sigmoid", has_groups=True, normalizes=hf.norm_topk_prob is not False)


def deepseek3_behind_one(hf: HfMoeConfig) -> MoeConfig:
    """As DeepSeek V3, with a dense first layer where config.json names no dense ones: GLM-4.5 and later,
    EXAONE MoE."""
    return _deepseek(hf, "sigmoid", has_groups=True, normalizes=hf.norm_topk_prob is not False, num_dense=1)


def longcat(hf: HfMoeConfig) -> MoeConfig:
    """LongCat Flash: softmax scores with a correction bias; experts beside every second feed-forward, and
    experts that return what they are given."""
    num_experts, top_k, inner = _sizes(hf, _inner(hf))
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        has_bias=True,
        layers=tuple(i % 2 == 0 for i in range(hf.num_hidden_layers)),
        routing=Routing(top_k=top_k, scale=hf.routed_scaling_factor),
        num_zero=hf.zero_expert_num or 0,
        is_shortcut=True,
    )


def lfm2(hf: HfMoeConfig) -> MoeConfig:
    """LFM 2: as DeepSeek V3 without groups and shared experts; the correction bias may be missing."""
    return structs.replace(deepseek3(hf), has_bias=hf.use_expert_bias)


def nemotron_h(hf: HfMoeConfig) -> MoeConfig | None:
    """Nemotron-H: as DeepSeek V3, without gates, and in some models within a latent."""
    if "sparse" not in (hf.mlp_layer_types or ()):
        return None
    return structs.replace(
        deepseek3(hf),
        is_gated=False,
        latent_size=hf.moe_latent_size,
        shared_size=hf.moe_shared_expert_intermediate_size,
    )


def step(hf: HfMoeConfig) -> MoeConfig:
    """Step 3.5: as DeepSeek V3 without groups; experts of some layers clamp their activations."""
    limits = tuple(limit or 0.0 for limit in (hf.swiglu_limits or ())[: hf.num_hidden_layers])
    if limits and len(limits) < hf.num_hidden_layers:
        raise ModelError(
            f"config.json: swiglu_limits has {len(limits)} entries for {hf.num_hidden_layers} layers"
        )
    return structs.replace(
        _deepseek(hf, "sigmoid", has_groups=False, normalizes=hf.norm_topk_prob is not False),
        has_bias=hf.use_moe_router_bias,
        shared_size=hf.moe_shared_expert_intermediate_size,
        limits=limits if any(limits) else (),
    )


def deepseek32(hf: HfMoeConfig) -> MoeConfig:
    """As DeepSeek V3, with three dense layers where config.json names none: DeepSeek V3.2."""
    return _deepseek(hf, "sigmoid", has_groups=True, normalizes=hf.norm_topk_prob is not False, num_dense=3)


def gpt_oss(hf: HfMoeConfig) -> MoeConfig:
    """gpt-oss: stacked experts with biases in every layer."""
    num_experts, top_k, inner = _sizes(hf, hf.intermediate_size)
    if (hf.swiglu_alpha, hf.swiglu_limit) != (1.702, 7.0):
        raise ModelError(
            f"config.json: swiglu_alpha {hf.swiglu_alpha} with swiglu_limit {hf.swiglu_limit} is not "
            "supported; "
            "supported is 1.702 with 7"
        )
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=inner,
        layers=_all_layers(hf),
        routing=Routing(top_k=top_k, normalizes=True),
        is_stacked=True,
    )
