"""Where torch_npu is not installed these tests are not collected; where it is, they need the simulation."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]
elif "SIM_CANN_LIBRARIES" not in os.environ:
    raise pytest.UsageError("run these with ./dev test-ascend, or under python -m tests.ascend.simulate")
