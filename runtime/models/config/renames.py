"""Names of tensors in the checkpoints of families, and ours. Torch-free."""

Renames = tuple[tuple[str, str], ...]  # parts of a checkpoint's tensor names -> ours, in this order

# of the decoders of GPT-NeoX, Falcon and BLOOM
NEOX_MLP: Renames = ((".mlp.dense_h_to_4h.", ".mlp.up."), (".mlp.dense_4h_to_h.", ".mlp.down."))

# names of norms in checkpoints whose post_attention_layernorm is that of attention's output
SANDWICH_NAMES: Renames = (
    ("post_attention_layernorm.", "attention_output_norm."),
    ("pre_feedforward_layernorm.", "post_attention_layernorm."),
    ("post_feedforward_layernorm.", "mlp_output_norm."),
)

GRANITE_NAMES: Renames = (
    (".block_sparse_moe.", ".mlp."),
    (".mlp.router.layer.", ".mlp.gate."),
    (".mlp.router.", ".mlp.gate."),
    (".shared_mlp.", ".mlp.shared_experts."),
)

DBRX_NAMES: Renames = (
    ("transformer.blocks.", "layers."),
    ("transformer.wte.", "embed_tokens."),
    ("transformer.norm_f.", "norm."),
    (".norm_attn_norm.norm_1.", ".input_layernorm."),
    (".norm_attn_norm.norm_2.", ".post_attention_layernorm."),
    (".norm_attn_norm.attn.out_proj.", ".self_attn.o_proj."),
    (".norm_attn_norm.attn.", ".self_attn."),
    (".ffn.router.layer.", ".mlp.gate."),
    (".ffn.experts.", ".mlp.experts."),
)

# names of the heads of reward models
REWARD_NAMES: Renames = (("score.0.", "score.first."), ("score.2.", "score.second."))

# names of a model's experts as the first Mixtral checkpoints had them
MIXTRAL_NAMES: Renames = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)

# the same of GLM-4-0414
GLM4_NAMES: Renames = (
    ("post_self_attn_layernorm.", "attention_output_norm."),
    ("post_mlp_layernorm.", "mlp_output_norm."),
)

INTERNLM2_NAMES: Renames = (
    ("tok_embeddings.", "embed_tokens."),
    ("output.", "lm_head."),
    ("v_head.", "score."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".attention.", ".self_attn."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    ("attention_norm.", "input_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
)

STEP_NAMES: Renames = (
    (".moe.router_bias", ".moe.gate.e_score_correction_bias"),
    (".moe.", ".mlp."),
    (".share_expert.", ".mlp.shared_experts."),
)

# of those whose blocks have no norms of inputs
POST_NAMES: Renames = (
    ("post_attention_layernorm.", "attention_output_norm."),
    ("post_feedforward_layernorm.", "mlp_output_norm."),
)
