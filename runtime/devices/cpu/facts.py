"""What is always true of the cpu device; torch-free."""

from runtime.devices.base import Facts
from runtime.models.quantization_schemes import SCHEMES

FACTS = Facts(name="cpu", dtypes=("float32", "bfloat16", "float16"), has_graphs=False, schemes=SCHEMES)
