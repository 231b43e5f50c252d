"""How long the GPU waits between the kernels of decode steps: one minus the union of its kernels and copies,
by torch's profiler. And which kernels take the time of a step.

    python -m bench.gpu_idle          # on a GPU: Llama-3.1-8B's shape, 1 to 256 sequences
    python -m bench.gpu_idle --dry    # every line, without a GPU; its figures are not recorded
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu_model import Model, folder_of, pages_for
from bench.lines import Figures, Lines
from bench.record import record, results_folder
from runtime.devices.cuda.interpret import use_interpreter

STEPS = 60
BATCHES = (1, 16, 64, 256)
LENGTH = 512
LONGEST = 16  # kernels that are named
BUSY = ("kernel", "gpu_memcpy", "gpu_memset")


def idle_share(events: list[dict[str, Any]], kinds: tuple[str, ...]) -> float:
    """The share of a trace, from the first to the last event of these kinds, in which there is no such
    event."""
    launches = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in kinds and "dur" in event
    )
    if not launches:
        raise RuntimeError("the profiler has recorded nothing on the GPU")
    busy, (begin, end) = 0.0, launches[0]
    for start, stop in launches:
        if start > end:
            busy, begin = busy + end - begin, start
        end = max(end, stop)
    return 1 - (busy + end - begin) / (end - launches[0][0])


def kernel_times(events: list[dict[str, Any]], kinds: tuple[str, ...], steps: int) -> dict[str, list[float]]:
    """The kernels of a trace that take the most time: name -> microseconds and launches a step."""
    found: dict[str, tuple[float, int]] = {}
    for event in events:
        if event.get("cat") in kinds and "dur" in event:
            name = event["name"][:90]
            time_us, count = found.get(name, (0.0, 0))
            found[name] = time_us + event["dur"], count + 1
    longest = sorted(found.items(), key=lambda one: -one[1][0])[:LONGEST]
    return {name: [round(time_us / steps, 1), round(count / steps, 2)] for name, (time_us, count) in longest}


def traced(model: Model, rows: int, length: int, steps: int) -> list[dict[str, Any]]:
    """The profiler's events of `steps` steps."""
    activities = [ProfilerActivity.CPU] if model.is_dry else [ProfilerActivity.CUDA]
    with TemporaryDirectory() as folder:
        with profile(activities=activities) as recording:
            model.decode(rows, steps)
        recording.export_chrome_trace(str(Path(folder) / "trace.json"))
        return json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]


def measure(found: dict[str, Any], *, is_dry: bool) -> dict[str, Any]:
    """Adds to `found` idle share and step time by number of sequences."""
    steps, length = (3, 70) if is_dry else (STEPS, LENGTH)
    with folder_of("llama-3.1-8b", is_dry=is_dry) as folder:
        for rows in (2,) if is_dry else BATCHES:
            model = Model.open(
                folder,
                slots=rows,
                longest=length + 4 * steps,
                tokens=pages_for(rows, length, 2 * steps),
                is_dry=is_dry,
                step_tokens=rows + (8 if is_dry else 512),
            )
            model.capture(rows)
            model.begin([length] * rows, 2 * steps)
            seconds = model.decode(rows, steps)
            events = traced(model, rows, length + steps, steps)
            kinds = ("cpu_op",) if is_dry else BUSY
            found[f"{rows} sequences"] = {
                "idle": round(idle_share(events, kinds), 4),
                "step_us": round(seconds * 1e6),
                "kernels": kernel_times(events, kinds, steps),
            }
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
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    lines = Lines(None if is_dry else results_folder() / "gpu.jsonl")
    results = {
        "card": "none" if is_dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sequences": measure(Figures("idle", lines), is_dry=is_dry),
    }
    if not is_dry:
        print(record("gpu_idle", results))


if __name__ == "__main__":
    main()
