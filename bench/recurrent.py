"""Recurrent layers on the CPU, between their projections: the kernels and torch in turns, in one process.

    python -m bench.recurrent [--threads 1] [--turns 5] [--batches 1,8] [--prompt 1024]

CPU time of one layer, in microseconds: a step of so many decoding sequences, and a prompt. Sequences take
turns too, so that their states come from memory. `of bandwidth` is the share, of the fastest reading of
memory just before and after, at which the kernels move a decode step's states, read and written.
"""

import argparse
import json
from dataclasses import replace
from statistics import median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.cpu import bandwidth
from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device
from runtime.devices.state_rows import StateRows
from runtime.layers.recurrent.gated_delta import GatedDeltaMixer
from runtime.layers.recurrent.mamba2 import Mamba2Mixer
from runtime.layers.weight import finish_loading
from runtime.messages.ranks import StartRank
from runtime.models.config.recurrent_config import GatedDelta, Mamba2

NUM_SLOTS = 96
SHAPES = {
    "qwen3-next": (
        2048,
        GatedDelta(
            key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4, eps=1e-6, layout="by_head"
        ),
    ),
    "mamba2-2.7b": (2560, Mamba2(num_heads=80, head_dim=64, state_dim=128, num_groups=1, kernel=4)),
}


class Given:
    """Stands for a projection: its outputs are given."""

    def __init__(self, out: int, sizes: list[int]) -> None:
        self.out, self.sizes = torch.randn(2048, out, dtype=torch.bfloat16), sizes

    def forward(self, x: Tensor) -> Tensor:
        """The first rows of what is given."""
        return self.out[: len(x)]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The first rows of what is given, cut into the outputs of the several projections in one."""
        return self.forward(x).split(self.sizes, dim=1)


def open_mixer(device: Device, shape: str) -> Any:
    """A layer of random weights, whose projections take no time."""
    hidden, config = SHAPES[shape]
    mixer: Any
    if isinstance(config, GatedDelta):
        mixer = GatedDeltaMixer(device, torch.bfloat16, hidden, config, 0, "none")
        keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
        mixer.in_proj_qkvz = Given(2 * keys + 2 * values, [])
        mixer.in_proj_ba = Given(2 * config.value_heads, [])
    else:
        mixer = Mamba2Mixer(device, torch.bfloat16, hidden, config, 0, "none")
        mixer.in_proj = Given(sum(mixer.in_proj.sizes), mixer.in_proj.sizes)
    mixer.out_proj = SimpleNamespace(forward=lambda x: x)
    for weight in (mixer.conv1d.weight, mixer.dt_bias, mixer.A_log, mixer.gated_norm.weight):
        weight.tensor.normal_(0, 0.3)
    if hasattr(mixer, "D"):
        mixer.D.tensor.normal_()
    finish_loading(mixer)
    return mixer


def microseconds(
    mixer: Any, states: tuple[Tensor, ...], rows: list[StateRows], count: int
) -> tuple[float, float]:
    """CPU time and wall time of the layer, a step over each of the rows in turn."""
    x = torch.empty(count, 1)
    began, cpu = perf_counter(), process_time()
    for own in rows:
        mixer.out_proj.forward(mixer.attend(mixer.project(x), SimpleNamespace(states=own)))
    return (process_time() - cpu) / len(rows) * 1e6, (perf_counter() - began) / len(rows) * 1e6


def main() -> None:
    """Prints one JSON line for each shape and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompt", type=int, default=1024)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    start: Any = dict(
        device="cpu", model_path="", dtype="bfloat16", load_format="auto", tp_size=1, page_size=16
    )
    start |= dict(max_slots=8, max_len=64, max_step_tokens=64, memory_fraction=0.5, max_total_tokens=None)
    device = open_device(
        StartRank(**start, num_threads=given.threads, rendezvous="", seed=0), 0, torch.bfloat16
    )
    for shape, (_, config) in SHAPES.items():
        mixers = {
            name: open_mixer(
                replace(device, recurrent=device.recurrent if name == "kernels" else None), shape
            )
            for name in ("kernels", "torch")
        }
        states = tuple(
            device.memory.allocate_states(
                NUM_SLOTS, form.shape, torch.float32 if form.is_wide else torch.bfloat16
            )
            for form in config.states(1)
        )
        bytes_of_state = sum(2 * state[0].nbytes for state in states)
        for batch in (*map(int, given.batches.split(",")), 0):
            slots = torch.arange(NUM_SLOTS)
            decodes = [slots[i : i + batch] for i in range(0, NUM_SLOTS - batch + 1, batch)] if batch else []
            none = slots[:0]
            rows = [StateRows([states], own) for own in decodes] or [
                StateRows([states], none, ((slot, 0, given.prompt),)) for slot in (1, 2)
            ]
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in mixers}
            speed = bandwidth(given.threads)
            for _ in range(given.turns):
                for name, mixer in mixers.items():
                    found[name].append(microseconds(mixer, states, rows, batch or given.prompt))
            speed = max(speed, bandwidth(given.threads))
            line: dict[str, Any] = {"shape": shape, "batch": batch, "prompt": 0 if batch else given.prompt}
            line |= {name: round(median(cpu for cpu, _ in times), 1) for name, times in found.items()}
            if batch:
                best = min(wall for _, wall in found["kernels"])
                line["of bandwidth"] = round(batch * bytes_of_state / best / 1e3 / speed, 2)
                line["GB/s"] = round(speed, 1)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
