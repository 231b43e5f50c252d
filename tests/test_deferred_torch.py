"""Parts of torch that a rank on the CPU does not use are imported when something asks for them."""

import subprocess
import sys

# each script is a process of its own: this one has imported all of torch
IMPORTED = """
from runtime.deferred_torch import DEFERRED, deferred, load_deferred
from runtime.devices.cpu.facts import FACTS
from runtime.ranks.open_executor import import_device
import_device("cpu")
import torch
"""


def run(script: str) -> list[str]:
    """The lines that a script prints after the imports of a rank."""
    done = subprocess.run([sys.executable, "-c", IMPORTED + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_rank_leaves_them_out_until_they_are_used() -> None:
    """And what depends on them works once they are loaded."""
    script = """
print(deferred() == list(DEFERRED))
from runtime.devices.cpu.self_check import load_library
library = load_library()
print(deferred() == list(DEFERRED))  # the kernels are checked without them
print(torch.export.Dim("n").__name__, "torch.export" in deferred())
load_deferred()
print(deferred())
print(torch.randn(2, generator=torch.Generator().manual_seed(3)).tolist())
print(tuple(torch.linalg.eigh(torch.empty(3, 3, device="meta")).eigenvectors.shape))
"""
    first, checked, used, left, numbers, shape = run(script)
    assert (first, checked, used, left, shape) == ("True", "True", "n False", "[]", "(3, 3)")
    import torch

    assert numbers == str(torch.randn(2, generator=torch.Generator().manual_seed(3)).tolist())


def test_a_compiler_has_them_first() -> None:
    """Profiles import it, whose modules find one another in one order only."""
    script = """
print(len(deferred()) > 0, hasattr(torch, "_inductor"), deferred())
"""
    assert run(script) == ["True True []"]
