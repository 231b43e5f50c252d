"""The families with recurrent layers: rows of FAMILIES in registry.py. Torch-free."""

from msgspec import structs

from runtime.models.config import delta_config as deltas
from runtime.models.config import hybrid_names as names
from runtime.models.config import mamba1_config as mambas1
from runtime.models.config import mamba_config as mambas
from runtime.models.config import moe_families as experts
from runtime.models.config import zamba_config as zamba
from runtime.models.config.family import HYBRID, Family
from runtime.models.config.hybrid_config import lfm2, without_positions

QWEN3_5 = Family(
    model_class=HYBRID,
    hybrid=deltas.qwen3_5,
    keys=(("mtp_num_hidden_layers", "num_nextn_predict_layers"),),
    norm="rms_offset",
    qk_norm="head",
    renames=names.QWEN3_NEXT_NAMES,
)

HYBRIDS = {
    "Bamba": Family(model_class=HYBRID, hybrid=mambas.bamba, mlp_bias=None, renames=names.BAMBA_NAMES),
    "FalconH1": Family(
        model_class=HYBRID,
        hybrid=mambas.falcon_h1,
        mlp_bias=None,
        read=mambas.falcon_h1_factors,
        renames=names.BAMBA_NAMES,
    ),
    "FalconMamba": Family(
        model_class=HYBRID, hybrid=mambas1.falcon_mamba, is_tied=True, renames=names.MAMBA_NAMES
    ),
    "GraniteMoeHybrid": Family(
        model_class="runtime.models.hybrid:GraniteHybrid",
        hybrid=mambas.granite_hybrid,
        moe=experts.granite_hybrid,
        read=mambas.granite_hybrid_fields,
        renames=names.GRANITE_HYBRID_NAMES,
    ),
    "Jamba": Family(
        model_class=HYBRID,
        hybrid=mambas1.jamba,
        qkv_bias=False,
        o_bias=False,
        moe=experts.jamba,
        read=without_positions,
        renames=names.JAMBA_NAMES,
    ),
    "KimiLinear": Family(
        model_class="runtime.models.kimi_linear:KimiLinear",
        hybrid=deltas.kimi_linear,
        is_mla=True,
        keys=(
            ("model_max_length", "max_position_embeddings"),
            ("num_experts_per_token", "num_experts_per_tok"),
            ("moe_renormalize", "norm_topk_prob"),
            ("num_expert_group", "n_group"),
        ),
        moe=experts.deepseek3_behind_one,
        read=without_positions,
        renames=names.KIMI_NAMES,
    ),
    "Lfm2": Family(
        model_class=HYBRID,
        hybrid=lfm2,
        qkv_bias=False,
        o_bias=False,
        qk_norm="head",
        is_tied=True,
        renames=names.LFM2_NAMES,
    ),
    "Lfm2Moe": Family(
        model_class=HYBRID,
        hybrid=lfm2,
        keys=(("num_dense_layers", "first_k_dense_replace"),),
        defaults={"block_auto_adjust_ff_dim": False, "num_dense_layers": 2, "rope_theta": 1e6},
        qkv_bias=False,
        o_bias=False,
        qk_norm="head",
        moe=experts.lfm2,
        is_tied=True,
        renames=names.LFM2_NAMES,
    ),
    "Mamba": Family(model_class=HYBRID, hybrid=mambas1.mamba1, is_tied=True, renames=names.MAMBA_NAMES),
    "Mamba2": Family(model_class=HYBRID, hybrid=mambas.mamba2, renames=names.MAMBA_NAMES),
    "NemotronH": Family(
        model_class=HYBRID,
        hybrid=mambas.nemotron_h,
        keys=(("mlp_hidden_act", "hidden_activation"),),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=None,
        is_gated=False,
        activation="relu2",
        moe=experts.nemotron_h,
        read=without_positions,
        renames=names.NEMOTRON_NAMES,
    ),
    "OlmoHybrid": Family(
        model_class="runtime.models.hybrid:OlmoHybrid",
        hybrid=deltas.olmo_hybrid,
        placement="post",
        qk_norm="projection",
        read=deltas.olmo_hybrid_fields,
        renames=names.OLMO_NAMES,
    ),
    "Qwen3Next": Family(
        model_class=HYBRID,
        hybrid=deltas.qwen3_next,
        norm="rms_offset",
        qk_norm="head",
        moe=experts.qwen2,
        renames=names.QWEN3_NEXT_NAMES,
    ),
    "Qwen3_5": QWEN3_5,
    "Zamba2": Family(
        model_class="runtime.models.zamba2:Zamba2",
        hybrid=zamba.zamba2,
        qkv_bias=False,
        o_bias=False,
        activation="gelu",
        is_tied=True,
        fused={"gate_up_proj": "halves"},
        read=zamba.zamba2_fields,
        renames=names.ZAMBA_NAMES,
    ),
    "Qwen3_5Moe": structs.replace(
        QWEN3_5, moe=experts.qwen2, defaults={"norm_topk_prob": True, "intermediate_size": 1}
    ),
}
