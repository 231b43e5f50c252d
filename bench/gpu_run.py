"""What a GPU can check and measure, in parts of at most nine minutes: each section is a process with a time
limit of its own, and each figure a line of gpu.jsonl the moment it is known (in the folder $OUT, else
bench/results). So no section costs another one's results, and what was cut off leaves what it has seen.

    python -m bench.gpu_run A               # correctness: kernels, ranks, engines
    python -m bench.gpu_run B               # figures that no card has shown yet (docs/cuda.md)
    python -m bench.gpu_run C               # others: steps of whole models, idle time, products, experts
    python -m bench.gpu_run D               # torch.compile
    python -m bench.gpu_run E               # two GPUs: norms that sum over ranks
    python -m bench.gpu_run A B C D E --dry # every line of the benches, tiny, without a GPU

What launches many kernels compiles them first, as many at a time as there are cores: ranks at their start,
forms of attention by themselves, and those of other benches in a section that measures nothing.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from bench.lines import Lines
from bench.record import results_folder

PART_S = 540.0
FILE = "gpu.jsonl"
# tests of whole engines, which take the GPU where there is one
ENGINES = "exact recovery draft_models speculation adapters host_tier hybrid images windows drafts"
KERNELS, ENGINES_AT_ONCE = 14, 12  # processes of tests that run beside each other


class Section(Struct, frozen=True):
    """A process. It is started if at least `least_s` of the part's time are left, and ends after `most_s`.
    One that `joins` the section ahead of it starts together with it: tests do, benches never."""

    name: str
    command: tuple[str, ...]  # of Python's -m
    least_s: float
    most_s: float
    joins: bool = False

    @property
    def is_bench(self) -> bool:
        """Whether it is a bench, which has a dry run, and not tests."""
        return self.command[0].startswith("bench.")


def tests(name: str, words: str, most_s: float, *more: str, joins: bool = False) -> Section:
    """Tests; warnings of other installed packages do not count."""
    plugins = "-p no:cacheprovider -p no:benchmark -W default"
    return Section(name, ("pytest", "-q", *plugins.split(), *words.split(), *more), 30, most_s, joins)


def spread(processes: int) -> tuple[str, ...]:
    """Options of pytest that compile kernels in parallel, where its plugin is installed."""
    return ("-n", str(min(processes, os.cpu_count() or 1))) if find_spec("xdist") else ()


def parts() -> dict[str, list[Section]]:
    """The sections of each part, in order: correctness first, then what limits everything, then the rest."""
    devices = "test_conformance test_attention_conformance test_schemes".split()
    kernels = " ".join(["tests/devices/cuda", *(f"tests/devices/{name}.py" for name in devices)])
    chosen = "-m", "not ascend", "-k", "not cpu and not npu and not interpreter"
    engines = " ".join(f"tests/e2e/test_{name}.py" for name in ENGINES.split())
    unfit = "ranks parallel two travel xgrammar outlines"  # of several GPUs, or packages that may be missing
    one_card = " and ".join(f"not {word}" for word in unfit.split())
    return {
        "A": [
            tests("kernels are right", kernels, 200, *chosen, *spread(KERNELS)),
            tests("ranks are right", "tests/cuda --durations=5", 200, "-m", "cuda", joins=True),
            tests("engines are right", engines, 150, "-v", "-k", one_card, *spread(ENGINES_AT_ONCE)),
        ],
        "B": [
            Section("joined launches", ("bench.gpu_joined",), 15, 40),
            Section("fusion", ("bench.gpu_fusion",), 60, 140),
            Section("forms of attention", ("bench.gpu_attention",), 45, 120),
            Section("towers", ("bench.gpu_towers",), 20, 40),
            Section("steps of experts", ("bench.gpu_steps", "--only", "qwen3-30b-a3b"), 40, 80),
            Section("http", ("bench.gpu_serve",), 60, 120),
        ],
        "C": [
            Section("whole steps", ("bench.gpu_steps",), 40, 200),
            Section("idle", ("bench.gpu_idle",), 30, 60),
            Section("kernels of products", ("bench.gpu_gemm", "--compile"), 30, 90),
            Section("products and experts", ("bench.gpu_gemm",), 30, 80),
            Section("tuning", ("bench.gpu_tuning",), 30, 50),
            Section("kernels", ("bench.gpu",), 20, 50),
        ],
        "D": [Section("torch.compile", ("bench.gpu_compiled",), 60, 540)],
        "E": [Section("norms that sum", ("bench.gpu_norm_sums",), 30, 300)],
    }


def run(sections: Sequence[Section], lines: Lines, folder: Path, part_s: float, *, is_dry: bool) -> list[str]:
    """Runs sections one after the other, but for those that run beside others, within `part_s`. What the
    latter print goes to files of their names in `folder`. -> the names of those that failed, were cut off or
    had no time left"""
    end_s, bad = time.monotonic() + part_s, []
    for together in groups(sections):
        left_s = end_s - time.monotonic()
        if left_s < max(one.least_s for one in together):
            results = [f"skipped: {left_s:.0f} s are left"] * len(together)
        else:
            limits = [min(one.most_s, left_s) for one in together]
            names = [f"{one.name}.txt".replace(" ", "_") for one in together]
            logs = [folder / name if len(names) > 1 else None for name in names]
            with ThreadPoolExecutor(len(together)) as pool:
                results = list(pool.map(partial(_run_one, is_dry=is_dry), together, limits, logs))
        for section, result in zip(together, results, strict=True):
            lines.write("run", section.name, result)
            if not result.startswith("done"):
                bad.append(section.name)
    return bad


def groups(sections: Sequence[Section]) -> list[list[Section]]:
    """Sections by what runs at the same time, in their order."""
    found: list[list[Section]] = []
    for section in sections:
        if section.joins and found:
            found[-1].append(section)
        else:
            found.append([section])
    return found


def _run_one(section: Section, limit_s: float, log: Path | None, *, is_dry: bool) -> str:
    command = [sys.executable, "-m", *section.command, *(["--dry"] if is_dry else [])]
    begin_s = time.monotonic()
    with ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("w"))
        process = stack.enter_context(
            subprocess.Popen(command, process_group=0, stdout=output, stderr=output)
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"cut off after {limit_s:.0f} s"
        finally:  # with what it has started: a server would keep the GPU's memory
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    took = f"in {time.monotonic() - begin_s:.0f} s"
    return f"done {took}" if code == 0 else f"failed with exit code {code} {took}"


def main() -> int:
    """Runs the parts. Returns 1 where a section did not end well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=list(parts()), metavar="PART", help="A to E")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seconds", type=float, default=PART_S, help="time for each part")
    args = parser.parse_args()
    folder = results_folder()
    lines = Lines(None if args.dry else folder / FILE)
    bad: list[str] = []
    for part in args.parts:
        sections = [one for one in parts()[part] if one.is_bench or not args.dry]
        bad += run(sections, lines, folder, args.seconds, is_dry=args.dry)
    if bad:
        print(f"not done: {', '.join(bad)}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
