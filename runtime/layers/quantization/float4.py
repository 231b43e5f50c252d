"""Floats of 4 bits (E2M1): a sign, two bits of exponent and one of mantissa. The microscaling formats (MXFP4,
Open Compute Project, 2023), NVFP4 and a type of ggml have them, each with scales of its own."""

import torch

VALUES = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)  # of the codes
FP8_BYTES = VALUES.to(torch.float8_e4m3fn).view(torch.uint8)  # the same numbers as float8_e4m3
