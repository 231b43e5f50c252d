"""What all tests share: async tests run on uvloop, like the server; without a card, Triton's kernels are
interpreted."""

import os
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    # read when triton is first imported, by whichever library of a test comes first
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}
