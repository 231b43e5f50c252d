"""What is always true of the cuda device. Torch-free."""

from runtime.devices.facts import ANY_K, DeviceFacts
from runtime.models.config.quantization_schemes import SCHEMES

FACTS = DeviceFacts(
    name="cuda",
    page_size=64,
    chunk_tokens=8192,
    max_running=256,
    memory_fraction=0.95,
    memory_reason="what a step computes is measured and left free, the rest is for graphs",
    dtypes=("bfloat16", "float16", "float32"),
    attention_backend="triton",
    tower_attentions=("sdpa", "triton_attn"),  # ours has run on no card
    recurrent_backends=("torch_native", "triton", "flashinfer"),
    sampling_backends=("pytorch",),
    graph_max_running=256,
    captures_prompts=True,  # 32 tokens of Llama-3.1-8B on an H200: 27.8 ms kernel by kernel, 7.5 ms in pieces
    is_numbered=True,
    standby_bytes=400 << 20,
    schemes=SCHEMES,
    captured_samplers=((ANY_K, True),),
)
