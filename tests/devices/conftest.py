"""Without a card, Triton's kernels are interpreted: said before anything imports triton, which the Ascend tests' environment lacks."""

from importlib.util import find_spec

import torch

from runtime.devices.cuda.interpret import use_interpreter

collect_ignore = [] if find_spec("triton") is not None else ["cuda"]
if not collect_ignore and not torch.cuda.is_available():
    use_interpreter()
