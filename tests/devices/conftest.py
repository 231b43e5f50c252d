"""Without a card, Triton's kernels are interpreted: said before anything imports triton."""

import torch

from runtime.devices.cuda.interpret import use_interpreter

if not torch.cuda.is_available():
    use_interpreter()
