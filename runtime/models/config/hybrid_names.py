"""Names of tensors in the checkpoints of families with recurrent layers, and ours: see renames.py."""

MAMBA_NAMES = (
    (".mixer.dt_proj.bias", ".mixer.dt_bias"),
    ("backbone.", ""),
    ("embeddings.", "embed_tokens."),
    (".mixer.norm.", ".mixer.gated_norm."),
    (".norm.", ".input_layernorm."),
    ("norm_f.", "norm."),
)
JAMBA_NAMES = (
    (".mamba.dt_proj.bias", ".mamba.dt_bias"),
    (".mamba.", ".mixer."),
    (".feed_forward.router.", ".mlp.gate."),
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("final_layernorm.", "norm."),
)
BAMBA_NAMES = (
    (".mamba.norm.", ".mamba.gated_norm."),
    (".mamba.", ".mixer."),
    (".feed_forward.", ".mlp."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    ("final_layernorm.", "norm."),
)
# names of blocks are models/config/zamba_config.py's
ZAMBA_NAMES = (
    (".mamba_decoder.", "."),
    (".mamba.norm.", ".mamba.gated_norm."),
    (".mamba.", ".mixer."),
    (".linear.", ".self_attn.linear."),
    ("final_layernorm.", "norm."),
)
GRANITE_HYBRID_NAMES = (
    (".mamba.norm.", ".mamba.gated_norm."),
    (".mamba.", ".mixer."),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.router.", ".mlp.gate."),
    (".block_sparse_moe.", ".mlp."),
)
NEMOTRON_NAMES = (
    ("backbone.", ""),
    ("embeddings.", "embed_tokens."),
    (".mixer.norm.", ".mixer.gated_norm."),
    (".norm.", ".input_layernorm."),
    ("norm_f.", "norm."),
    *(
        (f".mixer.{name}.", f".mlp.{name}.")
        for name in (
            "up_proj",
            "down_proj",
            "gate",
            "experts",
            "shared_experts",
            "fc1_latent_proj",
            "fc2_latent_proj",
        )
    ),
    *((f".mixer.{name}_proj.", f".self_attn.{name}_proj.") for name in ("q", "k", "v", "o")),
)
LFM2_NAMES = (
    (".conv.conv.", ".mixer.conv."),
    (".conv.in_proj.", ".mixer.in_proj."),
    (".conv.out_proj.", ".mixer.out_proj."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".feed_forward.", ".mlp."),
    (".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    ("embedding_norm.", "norm."),
)
QWEN3_NEXT_NAMES = ((".linear_attn.norm.", ".linear_attn.gated_norm."), (".linear_attn.", ".mixer."))
# of delta rules whose queries, keys and values are apart
APART_NAMES = (
    *((f".mixer.{name}_proj.", f".mixer.in_{name}.") for name in ("q", "k", "v")),
    (".mixer.o_proj.", ".mixer.out_proj."),
    (".mixer.o_norm.", ".mixer.gated_norm."),
)
OLMO_NAMES = (
    (".post_attention_layernorm.", ".attention_output_norm."),
    (".post_feedforward_layernorm.", ".mlp_output_norm."),
    (".attention_layer_norm.", ".input_layernorm."),
    (".feedforward_layer_norm.", ".post_attention_layernorm."),
    (".linear_attn.", ".mixer."),
    *APART_NAMES,
    (".mixer.a_proj.", ".mixer.in_proj_a."),
    (".mixer.b_proj.", ".mixer.in_proj_b."),
    (".mixer.g_proj.", ".mixer.in_proj_z."),
)
# layers of the delta rule have been told apart from those of attention (models/kimi_linear.py)
KIMI_NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
    *APART_NAMES,
    (".mixer.forget_gate.", ".mixer."),
    *((f".mixer.{name}_proj.", f".mixer.low_{name[0]}.") for name in ("f_a", "g_a", "b")),
)
