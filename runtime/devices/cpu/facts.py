"""What is always true of the cpu device. Torch-free."""

from runtime.devices.facts import DeviceFacts
from runtime.models.config.quantization_schemes import SCHEMES

FACTS = DeviceFacts(
    name="cpu",
    page_size=16,
    chunk_tokens=512,
    step_ms=200,
    max_running=64,
    memory_fraction=0.6,
    memory_reason="a CPU's memory is shared with everything else on the machine",
    dtypes=("float32", "bfloat16", "float16"),
    attention_backend="torch_native",
    sampling_backends=("pytorch",),
    recurrent_backends=("cpu", "torch_native"),
    graph_max_running=0,
    standby_bytes=50 << 20,  # with its part of the fork server
    forks_ranks=True,
    schemes=SCHEMES,
    gathers_rows=True,
    has_tree_attention=True,
    offload_problem="it computes in host memory",
)
