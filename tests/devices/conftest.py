"""Without a card, Triton's kernels are interpreted: said before anything imports triton."""

from importlib.util import find_spec

import torch

from runtime.devices.cuda.interpret import use_interpreter

if not torch.cuda.is_available() and find_spec("triton") is not None:  # the environment of the Ascend tests has none
    use_interpreter()
