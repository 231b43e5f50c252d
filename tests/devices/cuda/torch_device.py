"""Where kernels are tested: on the GPU if there is one, else on the cpu in Triton's interpreter."""

import torch

from runtime.devices.cuda.kernels.launch import Gpu, gpu_of

HAS_GPU = torch.cuda.is_available()
TORCH_DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
GPU = gpu_of(TORCH_DEVICE) if HAS_GPU else Gpu(132, 233472)  # tiles of the GPU, not of the interpreter
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    """Compares results with the tolerance of a dtype."""
    most = TOLERANCE[dtype] * slack
    torch.testing.assert_close(found.double().cpu(), expected.double().cpu(), atol=most, rtol=most)
