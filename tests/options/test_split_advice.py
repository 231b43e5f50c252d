"""Which split suits a model and devices: of published models by their config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from runtime.errors import OptionsError
from runtime.models.config.model_config import read_config
from runtime.options.facts import MachineFacts
from runtime.options.footprint import Footprint, Stored, footprint
from runtime.options.parse import from_values
from runtime.options.plan import Plan
from runtime.options.resolve import plan_for
from runtime.options.split_advice import Advice, Devices, split_advice

CONFIGS = json.loads((Path(__file__).parents[2] / "docs" / "model_configs.json").read_text())
GIB = 1 << 30
HOST = MachineFacts(cores=64, memory_bytes=1 << 40, entropy=1)
GIVEN = {"device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True}
NODES = {"nnodes": 2, "dist_init_addr": "10.0.0.1:50000", "tensor_parallel_size": 2}


def advised(folder: Path, model: str, count: int, gib: int, **options: Any) -> Advice:
    """The advice for a published model over devices of a kind."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
    given = GIVEN | {"model_path": str(folder)} | options
    config, devices = read_config(folder), Devices(count, gib * GIB)

    def attempt(flags: tuple[str, ...]) -> tuple[Plan, Footprint]:
        plan = plan_for(from_values(given | by_name(flags)), HOST)
        machine = structs.replace(HOST, memory_bytes=plan.parallel.processes_on_node * devices.memory_bytes)
        return plan, footprint(plan, config, machine, Stored(0, 0, 0, ""))

    plan = plan_for(from_values(given), HOST)
    return split_advice(attempt, devices, plan, config)


def by_name(flags: tuple[str, ...]) -> dict[str, int]:
    """Flags of a split as options by name."""
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    return dict(zip(names, map(int, flags[1::2]), strict=True))


def sizes_of(advice: Advice) -> tuple[int, ...]:
    """Tensor-parallel ranks, stages, groups of experts, replicas."""
    assert advice.flags is not None, advice.reason
    return tuple(map(int, advice.flags[1::2]))


@pytest.mark.parametrize(
    ("model", "count", "gib", "options", "sizes", "words"),
    [
        ("Llama-3.1-8B", 1, 80, {}, (1, 1, 1, 1), "1 rank"),
        ("Llama-3.1-8B", 8, 80, {}, (1, 1, 1, 8), "8 replicas share the requests"),
        (
            "Llama-3.1-8B",
            8,
            24,
            {},
            (2, 1, 1, 4),
            "with 1 rank a context of 131072 tokens would have no room",
        ),
        ("Llama-3.1-8B", 8, 24, {"context_length": 8192}, (1, 1, 1, 8), "8 replicas"),
        ("Llama-3.1-70B", 8, 80, {}, (4, 1, 1, 2), "with 2 ranks"),
        ("Qwen3-235B-A22B", 8, 80, {}, (8, 1, 8, 1), "whole experts on a rank"),
        ("DeepSeek-V3", 8, 80, NODES, (8, 2, 8, 1), "no split"),
    ],
)
def test_the_split_of_a_published_model(
    model: str,
    count: int,
    gib: int,
    options: dict[str, Any],
    sizes: tuple[int, ...],
    words: str,
    tmp_path: Path,
) -> None:
    advice = advised(tmp_path, model, count, gib, **options)
    if words == "no split":
        assert advice.flags is None and words in advice.shown and "quantized weights" in advice.reason
        return
    assert sizes_of(advice) == sizes
    assert words in advice.shown and f"{count} devices of {gib}.0 GiB" in advice.shown


def test_stages_follow_the_nodes(tmp_path: Path) -> None:
    advice = advised(tmp_path, "DeepSeek-V3", 8, 141, **NODES)
    assert sizes_of(advice) == (8, 2, 8, 1)
    assert "hidden states alone go from node to node" in advice.reason
    assert "latents are not divided" in advice.reason


def test_replicas_take_the_devices_of_all_nodes(tmp_path: Path) -> None:
    advice = advised(tmp_path, "Llama-3.1-8B", 8, 80, **NODES)
    assert sizes_of(advice) == (1, 1, 1, 16) and "of 16 devices of 80.0 GiB" in advice.reason
    advice = advised(tmp_path, "DeepSeek-V3", 8, 192, **NODES)
    assert advice.flags is not None and by_name(advice.flags)["data_parallel_size"] == 2


def test_what_a_start_refuses_is_no_split(tmp_path: Path) -> None:
    """Its heads are no multiple of 3: stages take their place, and all three devices."""
    advice = advised(tmp_path, "Llama-3.1-70B", 3, 80)
    assert advice.flags is not None
    sizes = by_name(advice.flags)
    assert sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"] == 3
    plan_for(from_values(GIVEN | {"model_path": str(tmp_path)} | sizes), HOST)


def test_no_split_is_possible(tmp_path: Path) -> None:
    def refuse(flags: tuple[str, ...]) -> tuple[Plan, Footprint]:
        raise OptionsError(["not this one"])

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-8B"]))
    plan = plan_for(from_values({"model_path": str(tmp_path), "skip_tokenizer_init": True}))
    advice = split_advice(refuse, Devices(2, GIB), plan, read_config(tmp_path))
    assert advice == Advice(None, "no split over 2 devices of 1.0 GiB is possible: not this one")
