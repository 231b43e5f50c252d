"""Experts with copies, at other places, and on the move: greedy output equals transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from runtime import Engine
from runtime.admin import expert_balancer
from runtime.core import Core
from runtime.errors import StartError
from runtime.messages.experts import in_order
from runtime.models.config.model_config import read_config
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from tests.e2e.conftest import Generate
from tests.e2e.test_exact import COUNT, OPTIONS, PROMPTS, run_all

pytestmark = pytest.mark.anyio

SPREAD: dict[str, Any] = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
MOVING: dict[str, Any] = {"enable_eplb": True, "eplb_rebalance_num_iterations": 3}
GROUPS: dict[str, Any] = {"enable_dp_attention": True, "data_parallel_size": 2}
WAYS: dict[str, dict[str, Any]] = {
    "sums": {},
    "groups": GROUPS,
    "exchange in groups": GROUPS | {"moe_a2a_backend": "deepep", "deepep_mode": "normal"},
    "exchange": {"moe_a2a_backend": "deepep", "deepep_mode": "normal"},
}


def core_of(engine: Engine) -> Core:
    core = engine._core  # type: ignore[attr-defined]
    assert isinstance(core, Core)
    return core


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
async def test_copies(
    way: str, dispatch: str, checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    options = (
        OPTIONS | SPREAD | WAYS[way] | {"ep_num_redundant_experts": 2, "ep_dispatch_algorithm": dispatch}
    )
    async with Engine(model_path=str(checkpoint("qwen3_moe")), **options) as engine:
        found = await run_all(engine, PROMPTS)
    assert found == [reference("qwen3_moe", prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["copies", "counts"])
async def test_places_in_stages(
    kind: str, checkpoint: Callable[[str], Path], reference: Generate, tmp_path: Path
) -> None:
    """A rank has those of its stage's layers."""
    options = OPTIONS | SPREAD | {"pipeline_parallel_size": 2, "ep_num_redundant_experts": 2}
    if kind == "counts":
        config = read_config(checkpoint("qwen3_moe"))
        assert config.moe is not None
        counts = [[10 * (1 + i) ** 2 for i in range(config.moe.num_experts)]] * config.num_layers
        file = tmp_path / "counts.json"
        file.write_bytes(msgspec.json.encode({"logical_count": counts}))
        options |= {"init_expert_location": str(file)}
    async with Engine(model_path=str(checkpoint("qwen3_moe")), **options) as engine:
        assert await run_all(engine, PROMPTS) == [reference("qwen3_moe", prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("way", WAYS)
async def test_experts_move_while_tokens_are_made(
    way: str,
    family: str,
    checkpoint: Callable[[str], Path],
    reference: Generate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Again and again, one layer at a time, and once more after the ranks have died."""
    monkeypatch.setattr(expert_balancer, "LOOK_EVERY_S", 0.01)
    expected = [reference(family, prompt, COUNT) for prompt in PROMPTS]
    options = OPTIONS | SPREAD | WAYS[way] | MOVING
    options |= {"ep_num_redundant_experts": 2, "eplb_rebalance_layers_per_chunk": 1}
    async with Engine(model_path=str(checkpoint(family)), **options) as engine:
        commands = next(iter(core_of(engine).replicas)).commands
        for _ in range(3):
            assert await run_all(engine, PROMPTS) == expected
        with anyio.fail_after(30):
            while not commands.expert_places.layers:
                assert await run_all(engine, PROMPTS[:2]) == expected[:2]
        placements = commands.expert_places.layers
        assert any(one != in_order(len(set(one)), len(one)) for one in placements.values())
        assert all(set(one) == set(range(len(one) - 2)) for one in placements.values()), "none is lost"
        next(iter(core_of(engine).replicas)).supervisor.ranks._ranks[1].process.kill()
        assert await run_all(engine, PROMPTS) == expected
        assert commands.expert_places.layers, "new ranks begin where those before them were"


@pytest.mark.parametrize("kind", ["placements", "counts"])
async def test_a_location_at_start(
    kind: str, checkpoint: Callable[[str], Path], reference: Generate, tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_moe")
    config = read_config(folder)
    assert config.moe is not None
    layers, experts = config.num_layers, config.moe.num_experts
    content = {"physical_to_logical_map": [list(range(experts))[::-1]] * layers}
    if kind == "counts":
        content = {"logical_count": [[100] + [1] * (experts - 1)] * layers}
    file = tmp_path / "experts.json"
    file.write_bytes(msgspec.json.encode(content))
    options = OPTIONS | SPREAD | {"init_expert_location": str(file)}
    async with Engine(model_path=str(folder), **options) as engine:
        places = next(iter(core_of(engine).replicas)).commands.expert_places
        assert all(sorted(one) == list(range(experts)) for one in places.layers.values())
        assert kind == "counts" or places.of_layer(0, experts)[0] == experts - 1
        assert await run_all(engine, PROMPTS) == [reference("qwen3_moe", p, COUNT) for p in PROMPTS]


def test_what_cannot_be(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = str(checkpoint("qwen3_moe"))
    for options, what in (
        ({"enable_eplb": True}, "--enable-eplb does nothing without experts"),
        (SPREAD | {"ep_num_redundant_experts": 1}, "cannot be spread evenly over 2 groups .*give 2"),
        (SPREAD | {"ep_num_redundant_experts": 900}, "more copies than"),
        (SPREAD | MOVING | {"load_format": "dummy"}, "--enable-eplb reads experts from the checkpoint"),
    ):
        with pytest.raises(StartError, match=what):
            Core(plan_for(from_values({"device": "cpu", "model_path": model, **options})))
