"""Decode steps of Llama-3.1-8B's shape on a GPU with torch.compile and without it, both in CUDA graphs.

python -m bench.gpu_compiled          # on a GPU; minutes, nearly all of them spent compiling
python -m bench.gpu_compiled --dry    # every line, tiny, without a compiler; its figures are not recorded
"""

import argparse
from typing import Any

import torch

from bench.gpu_model import Model, folder_of, pages_for
from bench.lines import Figures, Lines
from bench.record import record, results_folder
from runtime.devices.cuda.interpret import use_interpreter
from runtime.messages.ranks import CompileConfig
from runtime.ranks import compile as compiling

BATCHES = (1, 8, 32)
LENGTH, STEPS = 1024, 40


def measure(found: dict[str, Any], *, is_dry: bool) -> dict[str, Any]:
    """Adds to `found` microseconds of a step, by number of sequences; and seconds until the rank is ready."""
    batches, length, steps = ((2,), 70, 3) if is_dry else (BATCHES, LENGTH, STEPS)
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
            found[f"{name}, start_s"] = round(model.start_s, 1)
            for rows in batches:
                model.capture(rows)
                model.begin([length] * rows, steps)
                found[f"{name}, {rows} sequences, us"] = round(model.decode(rows, steps) * 1e6)
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
    lines = Lines(None if is_dry else results_folder() / "gpu.jsonl")
    results = {
        "card": "none" if is_dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "steps": measure(Figures("compiled", lines), is_dry=is_dry),
    }
    if not is_dry:
        print(record("gpu_compiled", results))


if __name__ == "__main__":
    main()
