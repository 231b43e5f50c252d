"""The host's part of a decode step on a rank: from a plan to a launched step, on the cpu with a model of next
to no arithmetic.

    python -m bench.launch [--rows 1 64 256]

`launch` is all that the rank's host does for a step on the cpu, with the model's own time, which a device
would spend in parallel; `inputs` is the host's part where the step is a graph: choosing the graph, packing
and handing over its inputs.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.cpu_rank import GREEDY, PAGE, start_rank
from bench.record import record
from runtime.devices.cpu.facts import FACTS
from runtime.messages.steps import Admit, StepPlan
from runtime.ranks.decode_graphs import Recorded
from runtime.ranks.graph_setup import GraphSetup
from runtime.ranks.open_graphs import open_graphs
from runtime.ranks.torch_executor import TorchExecutor

CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
"num_attention_heads": 1, "num_key_value_heads": 1,
"max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
"rope_theta": 10000.0, "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2}"""
STEPS = 200


class Nothing:
    """Graphs whose replay takes no time: what is left is the host's own part."""

    reads_lengths = False

    def capture(self, body: Any) -> None:
        """Captures nothing."""
        return None

    def replay(self, graph: Any, lengths: Any) -> None:
        """Replays nothing."""
        return None


def plan(step: int, rows: int, start: int, *, is_first: bool = False) -> StepPlan:
    """All rows decode at position `start`; each takes a page where one begins."""
    slots = np.arange(rows, dtype=np.int32)
    takes = is_first or start % PAGE == 0
    empty = np.empty(0, np.int32)
    admits = [Admit(slot, GREEDY, 1, empty) for slot in range(rows)] if is_first else []
    return StepPlan(
        step=step,
        num_decodes=0 if is_first else rows,
        admits=admits,
        slots=slots,
        counts=np.ones(rows, np.int32),
        samples=np.ones(rows, np.uint8),
        token_ids=slots % 50 if is_first else empty,
        page_slots=slots if takes else empty,
        page_rows=np.full(rows, start // PAGE, np.int32) if takes else empty,
        page_ids=(1 + slots * 32 + start // PAGE).astype(np.int32) if takes else empty,
    )


def measure(folder: Path, rows: int) -> dict[str, float]:
    """Median microseconds of a whole launch, and of the inputs of a graph."""
    runner = start_rank(folder, rows, max_len=1024, load_format="dummy")
    runner.launch(plan(0, rows, 0, is_first=True)).result()
    plans = [plan(step, rows, step) for step in range(1, STEPS)]
    launched = sorted(seconds(runner, step) for step in plans)
    loaded = runner.runner
    loaded.device = type(loaded.device)(
        FACTS,
        loaded.device.torch_device,
        loaded.device.ops,
        loaded.device.experts,
        loaded.device.memory,
        loaded.device.collectives,
        Nothing(),
    )  # type: ignore[arg-type]
    loaded.graph_setup = GraphSetup([rows])
    loaded.graphs, _ = open_graphs(loaded)
    assert loaded.graphs is not None
    loaded.graphs.recorded[rows], loaded.graphs.ready = (
        Recorded(object(), None, object(), None, torch.zeros(0), {}),
        [rows],
    )
    loaded.graphs.hidden = torch.zeros(rows, 16)
    inputs = sorted(seconds(runner, step) for step in plans)
    return {
        "rows": rows,
        "launch_us": launched[len(launched) // 2] * 1e6,
        "inputs_us": inputs[len(inputs) // 2] * 1e6,
    }


def seconds(runner: TorchExecutor, step: StepPlan) -> float:
    """Seconds from the launch of a step to its result."""
    begin = time.perf_counter()
    runner.launch(step).result()
    return time.perf_counter() - begin


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(CONFIG)
        runs = []
        for rows in arguments.rows:
            runs.append({name: round(value, 1) for name, value in measure(Path(folder), rows).items()})
            print(runs[-1], flush=True)
    record("launch", {"runs": runs})


if __name__ == "__main__":
    main()
