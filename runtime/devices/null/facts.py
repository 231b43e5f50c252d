"""What is always true of the null device. Torch-free."""

from runtime.devices.facts import DeviceFacts
from runtime.models.config.quantization_schemes import SCHEMES

FACTS = DeviceFacts(
    name="null",
    gathers_rows=True,
    page_size=16,
    chunk_tokens=8192,
    max_running=256,
    memory_fraction=0.9,
    memory_reason="it holds nothing",
    dtypes=("float32", "bfloat16", "float16"),
    attention_backend="torch_native",
    sampling_backends=("pytorch",),
    graph_max_running=0,
    schemes=SCHEMES,
    has_tree_attention=True,
    has_logits=False,
    offload_problem="it holds none",
)
