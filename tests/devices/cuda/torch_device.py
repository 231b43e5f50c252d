"""Where kernels are tested: on the card where there is one, else on the cpu in Triton's interpreter."""

import torch

from runtime.devices.cuda.kernels.launch import Card, card_of

HAS_CARD = torch.cuda.is_available()
PLACE = torch.device("cuda" if HAS_CARD else "cpu")
CARD = card_of(PLACE) if HAS_CARD else Card(132, 233472)  # tiles of the card, not of the interpreter
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if HAS_CARD else (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    most = TOLERANCE[dtype] * slack
    torch.testing.assert_close(found.double().cpu(), expected.double().cpu(), atol=most, rtol=most)
