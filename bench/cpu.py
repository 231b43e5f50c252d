"""Decode and prefill of whole models on the CPU, by each way to compute them that this machine has, in turns.

    python -m bench.cpu [--shape qwen2.5-0.5b] [--weights bfloat16,int8,int4] [--batches 1,8,32] [--turns 3]
                        [--levels torch,avx512_bf16] [--record]
                        [--gguf FILE,... --llama-bench NAME=FOLDER,... --openvino PYTHON]

Every measurement is a process of its own, which also reads memory as fast as it can just before and after:
the share of that bandwidth at which a step reads its weights is what can be compared between hours and
machines. Peers take their turns with GGUF files of the same shape: any builds of llama.cpp, by the folders of
their `llama-batched-bench` and `llama-bench`, and OpenVINO GenAI, by the interpreter that has it.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.record import record

CONTEXT, STEPS, PREFILL = 128, 24, 1024
WARM_STEPS = 40  # before those that count: the first ones make a screen of the head (docs/cpu.md)
PROBE_BYTES = 1 << 30


def bandwidth(num_threads: int) -> float:
    """GB/s at which all threads read memory together, in huge pages as weights are: the best of four passes
    over a gigabyte."""
    from time import perf_counter

    from runtime.devices.cpu.kernels.levels import supported_levels
    from runtime.devices.cpu.kernels.library import Library
    from runtime.devices.cpu.packed_memory import array_over, prefer_huge_pages

    library = Library(supported_levels()[0])
    team = library.functions.kernels_start(num_threads)
    memory = mmap.mmap(-1, PROBE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    prefer_huge_pages(memory)
    data = array_over(memory)
    data[:] = 1
    best = 0.0
    for _ in range(4):
        begin = perf_counter()
        library.functions.kernels_read(team, data.ctypes.data, PROBE_BYTES)
        best = max(best, PROBE_BYTES / (perf_counter() - begin) / 1e9)
    library.functions.kernels_stop(team)
    return best


def measure(shape: str, weights: str, batches: list[int], prefill: int) -> dict[str, Any]:
    """This process's way to compute one model: ms a step for each batch, tokens/s of a prompt, bytes."""
    import resource

    import torch

    from bench.gpu_model import Model, folder_of, pages_for

    num_threads = len(os.sched_getaffinity(0))
    before = bandwidth(num_threads)
    is_plain = weights in ("float32", "bfloat16", "float16")
    rows, length = max(batches), CONTEXT
    with folder_of(shape, is_dry=False) as folder:
        model = Model.open(
            folder,
            slots=rows,
            longest=max(prefill, length) + 4 * STEPS * len(batches),
            tokens=pages_for(rows, max(prefill, length), 4 * STEPS * len(batches)),
            step_tokens=max(prefill, 512, rows),
            is_dry=False,
            device="cpu",
            quantization=None if is_plain else weights,
            dtype=weights if is_plain else "bfloat16",
        )
    found: dict[str, Any] = {"start_s": round(model.start_s, 2), "weights_mb": model.weights_bytes >> 20}
    head_bytes = model.config.vocab_size * model.config.hidden_size  # that 8 bits save of a head in 16
    saved = head_bytes if weights in ("int8", "int4") else 0
    found["read_mb"] = int(model.read_bytes(1) - saved) >> 20
    found["prefill_tokens_s"] = round(prefill / model.prefill(prefill, 3), 1) if prefill else 0.0
    decode = {}
    for batch in batches:
        model.begin([length] * batch, WARM_STEPS + STEPS)
        model.decode(batch, WARM_STEPS)
        decode[str(batch)] = round(1000 * model.decode(batch, STEPS), 2)
    found["step_ms"] = decode
    states = model.runner.runner.states  # one more than there are sequences
    found["state_kb"] = 0 if states is None else (states.num_bytes // states.num_state_slots) >> 10
    found["gb_s"] = [round(before, 1), round(bandwidth(num_threads), 1)]
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    found["torch"] = torch.__version__
    return found


def child(level: str, arguments: list[str]) -> dict[str, Any]:
    """`measure` in a process that computes by `level`. Raises CalledProcessError."""
    environment = os.environ | {"RUNTIME_CPU_KERNELS": "none" if level == "torch" else level}
    command = [sys.executable, "-m", "bench.cpu", "--child", *arguments]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_peer(command: list[str], stderr: int | None = None) -> str:
    """What a peer's program prints, on stderr too where that is subprocess.STDOUT. It runs in a folder of its
    own, for some leave files where they run. Raises CalledProcessError."""
    with TemporaryDirectory() as scratch:
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=scratch
        )
    return done.stdout


def batched_steps(printed: str) -> dict[str, float]:
    """Milliseconds of a step by the number of sequences, from the table that llama-batched-bench prints: rows
    between bars with names above them. Raises ValueError where there is none."""
    found, names = {}, []
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "T_TG s" in cells:
            names = cells
        elif names and len(cells) == len(names) and cells[0].isdigit():
            named = dict(zip(names, cells, strict=True))
            found[named["B"]] = round(1000 * float(named["T_TG s"]) / int(named["TG"]), 2)
    if not found:
        raise ValueError(f"llama-batched-bench printed no figures: {printed[-500:]}")
    return found


def llama_cpp(folder: Path, gguf: Path, batches: list[int]) -> dict[str, Any]:
    """The figures of a build of llama.cpp for one file: its own programs, as many threads as CPUs."""
    folder, gguf = folder.absolute(), gguf.absolute()
    threads = str(len(os.sched_getaffinity(0)))
    sizes = ",".join(map(str, batches))
    most = str(max(batches) * (CONTEXT + STEPS) + 64)
    command = [str(folder / "llama-batched-bench"), "-m", str(gguf), "-c", most, "-npp", str(CONTEXT)]
    command += ["-ntg", str(STEPS), "-npl", sizes, "-t", threads, "-tb", threads]
    steps = batched_steps(run_peer(command, stderr=subprocess.STDOUT))  # ik_llama.cpp's table is there
    command = [str(folder / "llama-bench"), "-m", str(gguf), "-p", str(PREFILL), "-n", "0"]
    command += ["-t", threads, "-r", "2"]
    prompt = json.loads(run_peer([*command, "-o", "json"]))
    return {"step_ms": steps, "prefill_tokens_s": round(prompt[0]["avg_ts"], 1)}


def openvino(interpreter: str, gguf: Path, batches: list[int]) -> dict[str, Any]:
    """OpenVINO GenAI's figures for one file."""
    sizes = ",".join(map(str, batches))
    numbers = [str(number) for number in (CONTEXT, STEPS, PREFILL)]
    script, file = Path(__file__).parent / "openvino_peer.py", gguf.absolute()
    program = str(Path(interpreter).absolute()) if "/" in interpreter else interpreter
    out = run_peer([program, str(script.absolute()), str(file), sizes, *numbers])
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def peers(args: argparse.Namespace) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """What there is to run beside ours: names, and functions that measure."""
    batches = [int(batch) for batch in args.batches.split(",")]
    found: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for gguf in (Path(name) for name in args.gguf.split(",") if name):
        for name, _, folder in (each.partition("=") for each in args.llama_bench.split(",") if each):
            found.append((f"{gguf.stem} {name}", partial(llama_cpp, Path(folder), gguf, batches)))
        if args.openvino:
            found.append((f"{gguf.stem} openvino", partial(openvino, args.openvino, gguf, batches)))
    return found


def medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The turns of one variant as one."""
    steps = {
        batch: round(median(each["step_ms"][batch] for each in found), 2) for batch in found[0]["step_ms"]
    }
    prefill = round(median(each["prefill_tokens_s"] for each in found), 1)
    share = {}
    if "read_mb" in found[0]:  # the share of the bandwidth at which one sequence's step moves its bytes:
        # weights are read, recurrent states are read and written
        moved = [each["read_mb"] * 2**20 + 2 * each["state_kb"] * 2**10 for each in found]
        read = [bytes_ / each["step_ms"]["1"] / 1e6 for bytes_, each in zip(moved, found, strict=True)]
        share = {
            "share_of_bandwidth": round(
                median(gb / max(each["gb_s"]) for gb, each in zip(read, found, strict=True)), 2
            )
        }
    return {"step_ms": steps, "prefill_tokens_s": prefill, **share, "turns": found}


def main() -> None:
    """Runs and prints every variant in turns; --record keeps the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--weights", default="bfloat16,int8,int4")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--levels", default="", help="default: torch and the best level of the kernels")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--gguf", default="", help="files of the same shape for peers")
    parser.add_argument(
        "--llama-bench", default="", help="NAME=FOLDER,... with llama-bench and llama-batched-bench"
    )
    parser.add_argument("--openvino", default="", help="an interpreter that has openvino-genai")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    if args.child:
        print(json.dumps(measure(args.shape, args.weights, batches, 0 if args.no_prefill else PREFILL)))
        return
    from runtime.devices.cpu.kernels.levels import supported_levels

    levels = args.levels.split(",") if args.levels else ["torch", supported_levels()[0].name]
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.turns):
        for weights in args.weights.split(","):
            for level in levels:
                options = ["--shape", args.shape, "--weights", weights, "--batches", args.batches]
                result = child(level, options + ["--no-prefill"] * args.no_prefill)
                found.setdefault(f"{weights} {level}", []).append(result)
                print(weights, level, json.dumps(result), flush=True)
        for name, measured in peers(args):
            result = measured()
            found.setdefault(name, []).append(result)
            print(name, json.dumps(result), flush=True)
    results = {"shape": args.shape, "context": CONTEXT, "variants": {k: medians(v) for k, v in found.items()}}
    for name, variant in results["variants"].items():
        shown = {key: value for key, value in variant.items() if key != "turns"}
        print(f"{name:32} {json.dumps(shown)}")
    if args.record:
        print(record("cpu", results))


if __name__ == "__main__":
    main()
