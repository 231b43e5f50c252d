"""Child processes: how they are started, and their environment."""

import os
import resource
import site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# what NCCL shall do unless the operator or an option says otherwise, and why
NCCL = {
    # it would register the buffers of captured collectives with all ranks and keep them so until the graphs
    # are gone; what that gains, and how it ends, no two GPUs have shown yet
    "NCCL_GRAPH_REGISTER": "0",
    # buffers for reductions in the switch are memory of each GPU that is taken late, beside torch's allocator
    # and after the pages were measured; --enable-nccl-nvls asks for them
    "NCCL_NVLS_ENABLE": "0",
    # a rank that hangs is found and ended by the server (--watchdog-timeout), which logs its stack; a dump of
    # what NCCL did would only hold up that end
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def environment(num_threads: int | None) -> dict[str, str]:
    """A child's environment: the parent's, and variables that libraries read when they are imported.
    `num_threads`: threads of OpenMP and MKL; None: their default."""
    variables = {
        "GLOO_SOCKET_IFNAME": "lo",  # ranks of one machine; its host name may resolve to nothing
        # `import torch` would import torch_npu, and fail with it; a device imports its own
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OPENBLAS_NUM_THREADS": "1",  # numpy's; ranks do no linear algebra with numpy
        # idle OpenMP threads sleep after some 10 µs; by default they stay awake for milliseconds, and take
        # the cores of everything else
        "GOMP_SPINCOUNT": "1000",
        **NCCL,
        **os.environ,
    }
    if num_threads is not None:
        variables |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
    root = str(Path(__file__).resolve().parents[2])  # last on the path, in case this package is not installed
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths and root not in site.getsitepackages():
        paths.append(root)
    return variables | {"PYTHONPATH": os.pathsep.join(paths)}


def raise_open_files() -> int:
    """Lets this process and its children open as many files as the machine allows them. -> how many; at
    most MOST_OPEN_FILES are asked for"""
    from runtime.options.facts import MOST_OPEN_FILES  # here, because it imports much

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def start_module(
    module: str, arguments: Sequence[str], environment: dict[str, str], fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Starts `python -m module` in a process group of its own: Ctrl-C is for the parent, from the first
    moment on. The child inherits the descriptors `fds`; what it prints goes to stderr. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,  # what a library prints must not get into our output
        pass_fds=fds,
        process_group=0,
    )
