"""Decode steps of Llama-3.1-8B's shape on a GPU with torch.compile and without it, both in CUDA graphs.

python -m bench.gpu_compiled          # on a GPU; minutes, nearly all of them spent compiling
python -m bench.gpu_compiled --dry    # every line, tiny, without a compiler; its figures are not recorded
"""

import argparse
import json
from typing import Any

import torch

from bench.gpu_model import Model, folder_of, pages_for
from bench.record import record
from runtime.devices.cuda.interpret import use_interpreter
from runtime.messages.ranks import CompileConfig
from runtime.ranks import compile as compiling

BATCHES = (1, 8, 32)
LENGTH, STEPS = 1024, 40


def measure(*, is_dry: bool) -> dict[str, Any]:
    """Microseconds of a step, by number of sequences; and seconds until the rank is ready."""
    batches, length, steps = ((2,), 70, 3) if is_dry else (BATCHES, LENGTH, STEPS)
    found: dict[str, Any] = {}
    with folder_of("llama-3.1-8b", is_dry=is_dry) as folder:
        for name, compiled in (("ours", CompileConfig()), ("compiled", CompileConfig(max_rows=max(batches)))):
            model = Model.open(
                folder,
                slots=max(batches),
                longest=2048,
                tokens=pages_for(max(batches), length, steps),
                is_dry=is_dry,
                step_tokens=max(batches) + 64,
                compiled=compiled,
            )
            found[name] = {"start_s": round(model.start_s, 1)}
            for rows in batches:
                model.capture(rows)
                model.begin(rows, length, steps)
                found[name][f"{rows} sequences, us"] = round(model.decode(rows, length, steps) * 1e6)
            model.close()
    return found


def main() -> None:
    """Prints and records the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    is_dry = parser.parse_args().dry
    if is_dry:
        use_interpreter()
        compiling.HOW = {"backend": "eager"}
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    results = {
        "card": "none" if is_dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "steps": measure(is_dry=is_dry),
    }
    print(json.dumps(results, indent=2))
    if not is_dry:
        print(record("gpu_compiled", results))


if __name__ == "__main__":
    main()
