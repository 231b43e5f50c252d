"""torch's libraries are loaded by a thread while modules are imported that need none of them."""

import subprocess
import sys

# what ranks/worker.py has imported when it imports its device
WORKER = """
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from runtime import log
import runtime.ranks.worker
from runtime.ranks import torch_libraries
log.import_structlog()

def extensions():
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return {name for name, file in files.items() if file.endswith(tuple(EXTENSION_SUFFIXES))}
"""


def run(script: str) -> list[str]:
    """The lines that a script prints in the place of a worker."""
    done = subprocess.run([sys.executable, "-c", WORKER + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_is_imported_ahead_waits_for_no_library() -> None:
    """An extension module would wait until torch's libraries are loaded, and so would all after it."""
    script = """
for name in torch_libraries.BEFORE:
    __import__(name)
before = extensions()
torch_libraries.import_ahead()
print([name for name in torch_libraries.AHEAD if name not in sys.modules])
print("torch" in sys.modules, sorted(extensions() - before))
"""
    assert run(script) == ["[]", "False []"]


def test_the_libraries_are_loaded_and_the_thread_has_ended() -> None:
    script = """
import threading
from pathlib import Path
with torch_libraries.loading_libraries():
    print(threading.active_count())
maps = Path("/proc/self/maps").read_text()
print(all(name in maps for name, _ in torch_libraries.LIBRARIES), threading.active_count())
import torch
print(torch.ones(2).sum().item())
with torch_libraries.loading_libraries():
    print(threading.active_count())
"""
    assert run(script) == ["2", "True 1", "2.0", "1"]


def test_a_library_that_is_missing_is_reported_by_its_user() -> None:
    script = """
torch_libraries.LIBRARIES = (("libnone.so", 2),)
with torch_libraries.loading_libraries():
    pass
import torch
print("torch" in sys.modules)
"""
    assert run(script) == ["True"]
