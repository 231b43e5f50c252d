"""What layers compute, seen by hooks and written to files, through the whole runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from runtime import Engine
from runtime.errors import InternalFault, StartError

pytestmark = pytest.mark.anyio

HERE = "tests.e2e.test_layer_watch"
PROMPT = [5, 6, 7, 8, 9]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 64,
    "max_total_tokens": 256,
    "disable_radix_cache": True,
}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 3}
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


async def answer(checkpoint: Path, **options: Any) -> list[int]:
    """The tokens that follow PROMPT."""
    async with Engine(model_path=str(checkpoint), **OPTIONS, **options) as engine:
        return (await engine.generate(PROMPT, **GREEDY)).token_ids


def passes(folder: Path, rank: int = 0) -> list[dict[str, Tensor]]:
    """The files of a rank, in order."""
    return [load_file(path) for path in sorted((folder / f"rank-{rank}").iterdir())]


def scale(config: dict[str, Any]) -> Callable[..., Tensor]:
    """A hook that multiplies what a layer computes."""
    return lambda layer, inputs, output: output * config["by"]


def break_token(config: dict[str, Any]) -> Callable[..., Tensor]:
    """A hook that makes the rows of every step NaN whose input is the embedding of no token but one."""

    def hook(layer: object, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output[inputs[0] == config["token"]] = float("nan")
        return output

    return hook


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
async def test_files_have_the_hidden_states_of_transformers(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    tokens = await answer(checkpoint(family), debug_tensor_dump_output_folder=str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(torch.tensor([PROMPT + tokens[:-1]]), output_hidden_states=True).hidden_states
    first, *later = passes(tmp_path)
    assert first["token_ids"].tolist() == PROMPT and first["positions"].tolist() == list(range(5))
    assert len(later) == 2
    torch.testing.assert_close(first["layers.0"], states[1][0, :5], **CLOSE)
    torch.testing.assert_close(torch.cat([step["layers.0"] for step in later]), states[1][0, 5:], **CLOSE)
    assert {"embed_tokens", "layers.0.self_attn.o_proj", "layers.1"} <= first.keys()


async def test_layers_and_steps_are_chosen(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    options = {"debug_tensor_dump_layers": (1,), "debug_tensor_dump_prefill_only": True}
    await answer(checkpoint("llama"), debug_tensor_dump_output_folder=str(tmp_path), tp_size=2, **options)
    for rank in range(2):
        (only,) = passes(tmp_path, rank)
        assert all(name.startswith("layers.1") for name in only.keys() - {"token_ids", "positions"})
        assert "layers.1.mlp" in only


async def test_layers_get_what_was_recorded(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    await answer(checkpoint("llama"), debug_tensor_dump_output_folder=str(tmp_path / "a"))
    recorded = passes(tmp_path / "a")[0]
    recorded["layers.0"] = recorded["layers.0"] + 1
    save_file(recorded, tmp_path / "recorded.safetensors")
    await answer(
        checkpoint("llama"),
        debug_tensor_dump_output_folder=str(tmp_path / "b"),
        debug_tensor_dump_input_file=str(tmp_path / "recorded.safetensors"),
        debug_tensor_dump_inject=True,
    )
    plain, injected = passes(tmp_path / "a"), passes(tmp_path / "b")
    assert torch.equal(injected[0]["layers.0"], plain[0]["layers.0"])  # what the layer itself computed
    assert not torch.equal(injected[0]["layers.1.self_attn.o_proj"], plain[0]["layers.1.self_attn.o_proj"])
    assert len(injected) == 3


async def test_a_hook_changes_what_a_layer_computes(checkpoint: Callable[[str], Path]) -> None:
    def hook(by: float) -> list[dict[str, Any]]:
        targets = ["model.layers.*.mlp"]
        return [{"target_modules": targets, "hook_factory": f"{HERE}:scale", "config": {"by": by}}]

    plain = await answer(checkpoint("llama"))
    assert await answer(checkpoint("llama"), forward_hooks=hook(1.0)) == plain
    assert await answer(checkpoint("llama"), forward_hooks=hook(-3.0)) != plain


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("tests.e2e.test_layer_watch:nothing", "has no attribute 'nothing'"),
        ("tests.nowhere:make", "No module named"),
        ("tests.e2e.test_layer_watch:passes", "made no hook"),
    ],
)
async def test_a_factory_that_makes_no_hook(
    checkpoint: Callable[[str], Path], factory: str, message: str
) -> None:
    with pytest.raises(StartError, match=f"--forward-hooks: {factory}.*{message}"):
        await answer(checkpoint("llama"), forward_hooks=[{"target_modules": ["*"], "hook_factory": factory}])


@pytest.mark.parametrize("more", [{}, {"tp_size": 2}, {"speculative_algorithm": "NGRAM"}], ids=str)
async def test_nan_ends_its_request_alone(checkpoint: Callable[[str], Path], more: dict[str, Any]) -> None:
    hooks = [
        {"target_modules": ["embed_tokens"], "hook_factory": f"{HERE}:break_token", "config": {"token": 77}}
    ]
    options = OPTIONS | {"forward_hooks": hooks, "enable_nan_detection": True} | more
    plain = await answer(checkpoint("llama"))
    async with Engine(model_path=str(checkpoint("llama")), **options) as engine:
        found: list[list[int] | str] = ["", "", ""]

        async def ask(place: int, prompt: list[int]) -> None:
            try:
                found[place] = (await engine.generate(prompt, **GREEDY)).token_ids
            except InternalFault as error:
                found[place] = error.message

        async with anyio.create_task_group() as tasks:
            for place, prompt in enumerate([PROMPT, [4, 77], PROMPT]):
                tasks.start_soon(ask, place, prompt)
        assert found[0] == found[2] == plain
        assert "computed NaN" in found[1]
        assert (await engine.generate(PROMPT, **GREEDY)).token_ids == plain
