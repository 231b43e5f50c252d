"""Triton's kernels are interpreted without a GPU (tests/conftest.py told triton so); the Ascend tests'
environment has no triton."""

import os
from importlib.util import find_spec

from runtime.devices.cuda.interpret import use_interpreter

collect_ignore = [] if find_spec("triton") is not None else ["cuda"]
if not collect_ignore and os.environ.get("TRITON_INTERPRET") == "1":
    use_interpreter()
