"""What is always true of Ascend NPUs (Atlas A2 and A3); torch-free."""

from runtime.devices.base import Facts

MOST_K = 1024  # that npu_top_k_top_p takes

# The attention of A2 and A3 takes no float32, whatever the facts say: a rank asks it at start (device.py).
FACTS = Facts(
    name="npu",
    dtypes=("bfloat16", "float16", "float32"),
    has_graphs=True,
    draws=((0, False), (MOST_K, True)),
    schemes=("int8", "int8_static", "int4_weight", "int8_weight", "int4_int8"),
)
