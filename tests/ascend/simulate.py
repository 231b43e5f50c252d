"""Runs a command on simulated NPUs: `python -m tests.ascend.simulate [--devices N] [--memory-mb N]
[--lenient] [--shapes] COMMAND ...`

The command and every Python process under it finds tests/ascend/site on its path: what imports torch_npu
there gets the simulated CANN libraries and the emulated operators. The command needs no change.
"""

import argparse
import os
import sys
from pathlib import Path

from tests.ascend.cann.build import build

EVERYTHING_MB = 1 << 24
SITE = Path(__file__).resolve().parent / "site"


# what ranks get where no option says otherwise; of the tests, test_production.py has it
PRODUCTION = {"TASK_QUEUE_ENABLE": "1", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}


def environment(devices: int = 8, memory_mb: int = 2048, lenient: bool = False) -> dict[str, str]:
    """The variables that make a process a simulated one. `lenient`: float32 and any head size are taken,
    which CANN documents for no operator."""
    libraries = build()
    paths = [
        str(SITE),
        *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)),
    ]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "SIM_CANN_LIBRARIES": str(libraries),
        "SIM_CANN_STRICT": "1",  # an operator that gets past the emulation is an error, not silence
        "SIM_NPU_COUNT": str(devices),
        "SIM_NPU_MEM_MB": str(memory_mb),
        "SIM_NPU_STRICT": str(int(not lenient)),
        "ASCEND_HOME_PATH": str(libraries / "home"),
        "ASCEND_OPP_PATH": str(libraries / "home" / "opp"),
        "TASK_QUEUE_ENABLE": "0",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # else `import torch` imports torch_npu
    }


def main() -> None:
    """Replaces this process by the command."""
    parser = argparse.ArgumentParser(
        prog="tests.ascend.simulate", description="Run a command on simulated NPUs."
    )
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument(
        "--memory-mb", type=int, default=2048, help="memory of each device, taken from this machine"
    )
    parser.add_argument(
        "--lenient", action="store_true", help="take float32 and any head size, as small models have them"
    )
    parser.add_argument(
        "--shapes",
        action="store_true",
        help="compute nothing but shapes; a model of any size fits, and results are arbitrary",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("a command is needed")
    memory_mb = EVERYTHING_MB if options.shapes else options.memory_mb
    os.environ.update(environment(options.devices, memory_mb, options.lenient))
    os.environ["SIM_NPU_SHAPES"] = str(int(options.shapes))
    sys.stdout.flush()
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    main()
