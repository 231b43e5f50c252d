"""Prints the operator calls of one decode step on an NPU: `./dev ascend-calls MODEL [--batch N] [--context N]
[--tp-size N] [--ep-size N]`

MODEL is a folder with a config.json (and quant_model_description.json, if modelslim quantized it); weights
are not read, and nothing is computed. The rank is the real one over a simulated NPU that knows shapes only
(SIM_NPU_SHAPES=1), so a model of any size takes seconds and little memory. One layer of each kind runs, and
is printed with the number of such layers. With several ranks the share of the first one is printed; the
others do not exist.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from runtime.errors import RuntimeFault
from runtime.models.config.model_config import ModelConfig, read_config
from runtime.models.config.quantization_config import DESCRIPTION
from tests.devices.drive import Planner, sampling, start

PAGE_SIZE = 128
FLAGS = ("mla_prolog", "nz_cache", "multi_stream")  # --npu-..., as runtime serve has them


def kind_of(config: ModelConfig, index: int) -> str:
    """The kind of a layer, as far as its calls depend on it."""
    window = config.windows[index]
    attention = "latent attention" if config.mla else f"a window of {window}" if window else "full attention"
    return f"{attention}, {'experts' if config.moe is not None and config.moe.layers[index] else 'dense'}"


def shortened(model: Path, folder: Path) -> tuple[ModelConfig, Counter[str]]:
    """Writes the model up to the last layer that is the first of its kind; returns its config and the number
    of layers of each kind."""
    config = read_config(model)
    kinds = [kind_of(config, index) for index in range(config.num_layers)]
    config_json = json.loads((model / "config.json").read_text())
    config_json["num_hidden_layers"] = max(kinds.index(kind) for kind in kinds) + 1
    if config_json.get("layer_types"):
        config_json["layer_types"] = config_json["layer_types"][: config_json["num_hidden_layers"]]
    (folder / "config.json").write_text(json.dumps(config_json))
    for path in model.glob(DESCRIPTION):
        shutil.copy(path, folder)
    return config, Counter(kinds)


class TracedCollectives:
    """Collectives of a rank without other ranks: each call is a line of the trace, and results have the right
    shape."""

    rank = 0
    stages = group = None  # there is one stage

    def __init__(self, size: int, trace: list[str]) -> None:
        self.size = size
        self.trace = trace

    def trace_call(self, name: str, x: Any) -> None:
        """Adds a line to the trace."""
        from tests.ascend.recorder import described

        self.trace.append(f"hccl.{name}({described(x)})")

    def all_reduce(self, x: Any) -> Any:
        """Returns x."""
        self.trace_call("all_reduce", x)
        return x

    def broadcast(self, x: Any) -> Any:
        """Returns x."""
        self.trace_call("broadcast", x)
        return x

    def all_gather(self, x: Any, dim: int) -> Any:
        """x once for each rank."""
        import torch

        self.trace_call("all_gather", x)
        return torch.cat([x] * self.size, dim=dim)

    def reduce_scatter(self, x: Any) -> Any:
        """A part of x."""
        self.trace_call("reduce_scatter", x)
        return x[: len(x) // self.size].clone()

    def all_to_all(self, x: Any, sent: list[int] | None = None, received: list[int] | None = None) -> Any:
        """Undefined rows of the right number."""
        self.trace_call("all_to_all", x)
        return x.clone() if received is None else x.new_empty(sum(received), *x.shape[1:])

    def close(self) -> None:
        """Nothing to do."""
        return None


def calls(model: Path, options: argparse.Namespace) -> str:
    """The text that is printed."""
    import torch_npu

    from runtime.devices.ascend import collectives
    from runtime.models import loader
    from tests.ascend.emulate.device import fallbacks
    from tests.ascend.recorder import folded, recorded

    assert torch_npu  # the simulation comes with it
    trace: list[str] = []

    def open_traced(rank: int, size: int, *_: Any, **__: Any) -> TracedCollectives:
        return TracedCollectives(size, trace)

    collectives.HcclCollectives = open_traced  # type: ignore[assignment,misc]
    loader._fill_random = lambda targets, seed, progress: None  # no numbers are read
    with tempfile.TemporaryDirectory() as folder:
        config, kinds = shortened(model, Path(folder))
        length = options.context + 2 * PAGE_SIZE
        executor, ready = start(
            folder,
            device="npu",
            load_format="dummy",
            dtype=options.dtype,
            page_size=PAGE_SIZE,
            max_slots=options.batch,
            max_len=length,
            max_total_tokens=options.batch * length,
            tp_size=options.tp_size,
            ep_size=options.ep_size,
            quantization=options.quantization,
            device_options={name: getattr(options, f"npu_{name}") for name in FLAGS},
        )
    planner = Planner(executor, ready, PAGE_SIZE)
    rows = [planner.row(slot, [1] * options.context, sampling()) for slot in range(options.batch)]
    # as if all but the last token were computed; the data of new sequences is sent with the first step
    for row in rows:
        row.computed = options.context - 1
    executor.launch(planner.plan(rows, [])).result()
    plan = planner.plan(rows, [])
    fallbacks.clear()
    mark(executor, config, trace)
    trace.clear()
    with recorded() as found:
        found.lines = trace
        executor.launch(plan).result()
    lines = sections(trace, kinds)
    head = [
        f"# {config.architecture}, {options.dtype}: a decode step of {options.batch} sequences, "
        f"{options.context + 1} tokens each",
        f"# rank 0 of {options.tp_size}"
        + (f", {options.ep_size} groups of experts" if options.ep_size > 1 else ""),
    ]
    tail = [f"# computed on the CPU: {name}, {count} times" for name, count in sorted(fallbacks.items())]
    return (
        "\n".join([*head, *(line for part in lines for line in ("", part[0], *folded(part[1]))), *tail])
        + "\n"
    )


def mark(executor: Any, config: ModelConfig, trace: list[str]) -> None:
    """Marks in the trace where layers begin and end."""
    layers = executor.runner.model.layers
    for index, layer in enumerate(layers):

        def before(*inputs: Any, run: Any = layer.before_attention, index: int = index) -> Any:
            trace.append(f"> {kind_of(config, index)}")
            return run(*inputs)

        def after(*inputs: Any, run: Any = layer.after_attention) -> Any:
            result = run(*inputs)
            trace.append("<")
            return result

        layer.before_attention, layer.after_attention = before, after


def sections(trace: list[str], kinds: Counter[str]) -> list[tuple[str, list[str]]]:
    """Titles and calls of the step before its layers, of the first layer of each kind, and after the
    layers."""
    parts: list[tuple[str, list[str]]] = [("# before the layers", [])]
    seen: set[str] = set()
    for line in trace:
        if line.startswith("> "):
            kind = line[2:]
            parts.append((f"# {kinds[kind]} layers: {kind}" if kind not in seen else "", []))
            seen.add(kind)
        elif line == "<":
            parts.append(("# behind the layers", []))
        else:
            parts[-1][1].append(line)
    last = len(parts) - 1
    return [
        (title, lines)
        for i, (title, lines) in enumerate(parts)
        if title and (title != "# behind the layers" or i == last)
    ]


def main() -> None:
    """Prints the calls."""
    parser = argparse.ArgumentParser(
        prog="./dev ascend-calls", description="The operator calls of a decode step on an Ascend NPU."
    )
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--context", type=int, default=1000, help="tokens of each sequence so far")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--ep-size", type=int, default=1)
    parser.add_argument("--quantization")
    for name in FLAGS:
        parser.add_argument(f"--npu-{name.replace('_', '-')}", action="store_true")
    options = parser.parse_args()
    try:
        sys.stdout.write(calls(options.model, options))
    except RuntimeFault as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
