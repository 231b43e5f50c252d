"""Variants of kernels that Triton would compile: `python -m tests.devices.cuda.variants bind`, `compile`, or
`serve FOLDER KV_DTYPE STEPS`; or graphs that cuDNN would build: `graphs FOLDER STEPS`. Prints JSON.

A server's rank starts and takes random steps on the cpu, with the kernels as an H200 would be given them.
They run nothing, and all that they would have written is zeros.
"""

import importlib
import json
import pkgutil
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pytest import MonkeyPatch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device
from runtime.devices.cpu.facts import FACTS
from runtime.devices.cpu.memory import CpuMemory
from runtime.devices.cuda import kernels
from runtime.devices.cuda.attention_backends import open_hybrid_backend
from runtime.devices.cuda.compile_ahead import TritonCompiler, ZeroedMemory
from runtime.devices.cuda.cudnn_pages import GraphSizes
from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.kernels.activation import act_and_mul
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.kernels.norm import rms_norm
from runtime.devices.cuda.mla_prolog import CudaPrologs
from runtime.devices.cuda.moe import CudaExperts
from runtime.devices.cuda.ops import CudaOps, SplitCounters
from runtime.devices.progress import without_progress
from runtime.messages.ranks import StartRank
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor
from tests.devices.cuda import cudnn_double, no_gpu
from tests.devices.drive import Planner, sampling, start_rank

ARCH, H200 = 90, Gpu(132, 233472, True)
SAMPLING_PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 7, "seed": 4},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "seed": 1},
    {"top_logprobs": 2},
]


def bind() -> dict[str, list[str]]:
    """Function of the kernels -> the arguments that Triton's binder loses."""
    backend, lost = make_backend(GPUTarget("cuda", ARCH, 32)), {}
    for module in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
        for name, function in vars(importlib.import_module(module.name)).items():
            if isinstance(function, JITFunction):
                binder = create_function_from_signature(function.signature, function.params, backend)
                given = {param.name: 3 + i for i, param in enumerate(function.params)}
                bound, specialization, options = binder(**given)
                wrong = {key for key in given if bound.get(key) != given[key]} | set(options)
                wrong |= {
                    param.name
                    for param, (kind, _) in zip(function.params, specialization, strict=True)
                    if kind != ("constexpr" if param.is_constexpr else "i32")
                }
                lost[name] = sorted(wrong)
    return lost


class Counted:
    """Variants seen so far, by kernel."""

    def __init__(self) -> None:
        self.variants: dict[str, list[dict[str, Any]]] = {}

    def compile(
        self, kernel: JITFunction, signature: Any, constants: Any, attributes: Any, options: Any
    ) -> None:
        names = kernel.arg_names
        facts = {"warps": options.num_warps, "stages": options.num_stages}
        facts |= {names[at[0]]: str(value) for at, value in constants.items()}
        facts |= {f"{names[at[0]]} of 16": True for at, fact in attributes.items() if fact}
        facts |= {f"{key} is": kind for key, kind in signature.items() if kind != "constexpr"}
        self.variants.setdefault(kernel.__name__, []).append(facts)


class LoadingDriver(no_gpu.Driver):
    """Takes compiled kernels as a card with enough memory, and knows their names."""

    def __init__(self, arch: int) -> None:
        super().__init__(arch)
        self.loaded: list[str] = []
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": H200.shared_bytes}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        assert binary[:4] == b"\x7fELF"
        self.loaded.append(name)
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None


def compile() -> dict[str, Any]:
    """Kernels that are compiled ahead by Triton, and what of that is reported."""
    loading, reports = LoadingDriver(ARCH), []
    driver.set_active(loading)
    x = torch.ones(4, 256, dtype=torch.bfloat16)
    with TritonCompiler(2, lambda: None).compiling(lambda *report: reports.append(report)):
        found = [rms_norm(x, x[0], 1e-5), rms_norm(x[:1], x[0], 1e-5), act_and_mul(x, "silu")]
    num_ahead = len(loading.loaded)
    rms_norm(x[:3], x[0], 1e-5)
    return {
        "loaded": sorted(loading.loaded),
        "at first launch": loading.loaded[num_ahead:],
        "reports": reports,
        "is zero": not any(bool(out.any()) for out in found),
    }


class Measured(CpuMemory):
    """The cpu's memory, measured as a GPU's is."""

    def measure_peak(self, run: Callable[[], None]) -> int:
        run()
        return 0


def start_on_cpu(message: StartRank, prefill: str = "triton") -> TorchExecutor:
    """A rank with the kernels of an H200, and those of `prefill` for prompts."""

    def opened(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
        device = open_device(start, rank, dtype)
        sizes = GraphSizes(start.max_slots, start.max_step_tokens, start.max_len)
        backend = open_hybrid_backend(prefill, "triton", dtype, H200, (9, 0), sizes)
        counters = SplitCounters.of("safe", H200, device.torch_device)
        ops = CudaOps(dtype, H200, attention_backend=backend, counters=counters)
        return replace(
            device,
            memory=Measured(**vars(device.memory)),
            ops=ops,
            experts=CudaExperts(H200),
            fused=CudaFusedOps(ops),
            mla_prologs=CudaPrologs(),
            programs=None,
            logits_ops=None,
            row_quantizer=None,
            compiler=TritonCompiler(1, lambda: None),
            take_pages=None if backend is None else backend.take_pages,
        )

    return TorchExecutor(start_torch_rank(0, message, without_progress, opened, FACTS))


def take_steps(planner: Planner, num_steps: int, message: StartRank) -> None:
    """Rows come with prompts of random lengths, in chunks, and decode together with others."""
    chance, rows, free = random.Random(7), [], list(range(message.max_slots))
    for _ in range(num_steps):
        budget, extends = chance.choice((8, 64, message.max_step_tokens)), []
        decodes = [row for row in rows if row.computed == len(row.tokens) - 1]
        chance.shuffle(decodes)
        decodes = decodes[: chance.choice((0, 1, len(decodes), len(decodes)))][:budget]
        waiting = [row for row in rows if row.computed < len(row.tokens) - 1]
        if free and chance.random() < 0.5:
            length = int(message.max_len ** chance.uniform(0.1, 0.99))
            prompt, params = [1] * length, sampling(**chance.choice(SAMPLING_PARAMS))
            waiting.append(row := planner.row(free.pop(), prompt, params))
            rows.append(row)
        left = budget - len(decodes)
        for row in waiting:
            if left > 0:
                count = min(len(row.tokens) - row.computed, chance.randint(1, left))
                extends.append((row, count))
                left -= count
        if decodes or extends:
            planner.run(decodes, extends)
        for row in list(rows):
            is_long = len(row.tokens) > message.max_len - 4
            if is_long or len(row.tokens) - row.prompt_len > chance.randint(2, 300):
                rows.remove(row)
                free.append(row.slot)
                planner.free += row.pages


def started(folder: str, kv_dtype: str) -> StartRank:
    """How a rank is started whose variants are counted."""
    return start_rank(
        folder,
        page_size=64,
        max_slots=32,
        max_len=4096,
        max_step_tokens=1024,
        kv_dtype=kv_dtype,
        max_total_tokens=1 << 17,
        dtype="bfloat16",
        num_threads=2,
    )


def graphs(folder: str, num_steps: str) -> dict[str, Any]:
    """Graphs of cuDNN before the first step, those of them that a step has used, and those after it."""
    cudnn_double.install(MonkeyPatch())
    double, used = cudnn_double.pygraph, set()

    def execute(graph: cudnn_double.pygraph, *args: Any, **kwargs: Any) -> None:
        used.add(id(graph))
        graph.check(*args, **kwargs)

    double.execute = execute  # type: ignore[assignment, method-assign]
    no_gpu.install(ARCH, lambda *args: None)
    message = started(folder, "auto")
    with ZeroedMemory():
        rank = start_on_cpu(message, "cudnn")
        at_start, before = len(double.built), len(used)
        take_steps(Planner(rank, rank.ready, 64), int(num_steps), message)
    later = [built.inputs[0].dim for built in double.built[at_start:]]
    return {"at start": at_start, "used at start": before, "used": len(used), "later": later}


def serve(folder: str, kv_dtype: str, num_steps: str) -> dict[str, Any]:
    """Variants before the first step and after it."""
    counted = Counted()
    no_gpu.install(ARCH, counted.compile)
    message = started(folder, kv_dtype)
    with ZeroedMemory():
        rank = start_on_cpu(message)
        before = {name: list(found) for name, found in counted.variants.items()}
        take_steps(Planner(rank, rank.ready, 64), int(num_steps), message)
    later = {
        name: found[len(before.get(name, ())) :]
        for name, found in counted.variants.items()
        if len(found) > len(before.get(name, ()))
    }
    return {"at start": {name: len(found) for name, found in sorted(before.items())}, "later": later}


COMMANDS: dict[str, Callable[..., Any]] = {"bind": bind, "compile": compile, "serve": serve, "graphs": graphs}

if __name__ == "__main__":
    print(json.dumps(COMMANDS[sys.argv[1]](*sys.argv[2:])))
