"""What is always true of Ascend NPUs (Atlas A2 and A3). Torch-free."""

from runtime.devices.facts import DeviceFacts

MAX_TOP_K = 1024  # largest top_k of npu_top_k_top_p
MAX_KEYS = 1 << 20  # the most keys of an attention call without pages, of all its rows together

FACTS = DeviceFacts(
    name="npu",
    page_size=128,
    chunk_tokens=4096,
    max_running=256,
    memory_fraction=0.9,
    memory_reason="what a step computes is measured and left free, the rest is for graphs and CANN",
    dtypes=("bfloat16", "float16"),
    # the attention of A2 and A3 takes no float32; a rank tries it at start (device.py)
    other_dtypes=("float32",),
    attention_backend="ascend",
    tower_attentions=("ascend_attn",),
    sampling_backends=("ascend", "pytorch"),
    graph_max_running=128,
    pads_graphs_freely=True,  # the host takes longer to launch a step's operators than they take
    page_sizes=(128, 256, 384, 512),
    latent_page_sizes=(128,),
    has_kv_dtypes=False,
    has_int8_kv=True,
    # CheckFeatureHeadDim in fused_infer_attention_score_tiling_check_feature.cpp of CANN's ops-transformer
    nz_heads=(64, 128),
    has_indexers=True,
    host_copies=("direct", "kernel", "kernel_ascend"),
    is_numbered=True,
    standby_bytes=500 << 20,
    schemes=("int8", "int8_static", "int4_weight", "int8_weight", "int4_int8"),
    captured_samplers=((0, False), (MAX_TOP_K, True)),
    scores_in_torch=True,
    offload_problem="its kernels want them in tiles that host memory cannot keep",
)
