"""What is always true of the cuda device; torch-free."""

from runtime.devices.base import ANY_K, Facts
from runtime.models.quantization_schemes import SCHEMES

FACTS = Facts(
    name="cuda",
    dtypes=("bfloat16", "float16", "float32"),
    has_graphs=True,
    draws=((ANY_K, True),),
    schemes=SCHEMES,
)
