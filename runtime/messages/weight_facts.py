"""What clients may know of the weights of the served model."""

from msgspec import Struct


class WeightFacts(Struct, frozen=True):
    """What is known of the weights of the served model."""

    num_weights: int = 0  # 0: not known
    level: str = ""  # the quantization or the dtype, such as Q4_K, FP8 or BF16
    format: str = "safetensors"  # of their files
