"""Draft models through the whole stack: answers are those without drafts, in company, with chunks, prefix
hits and preemption, on two ranks, and when ranks are killed; a model that drafts for itself is right."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import Engine
from runtime.errors import StartError
from tests.models.make import make_checkpoint
from tests.models.make_heads import make_eagle3
from tests.models.make_next_token import add_next_token_layers

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("drafts_pay")]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 256,
    "page_size": 4,
    "chunked_prefill_size": 24,
    "max_total_tokens": 384,  # too few for all: some give way
    "max_running_requests": 8,
}
STEM = [i * 7 % 250 for i in range(21)]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 1},
    {"temperature": 1.1, "seed": 2, "frequency_penalty": 0.4},
    {"temperature": 1.0, "top_k": 30, "seed": 3},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "target": make_checkpoint("qwen3", root / "target", num_hidden_layers=6),
        "other": make_checkpoint("llama", root / "other", num_hidden_layers=1, hidden_size=32),
        "head": make_eagle3(root / "head"),
    }


async def answers(folder: Path, kills: int = 0, **options: Any) -> tuple[list[list[int]], int, int]:
    """-> tokens of twelve requests at once, the steps of them all, and how often a sequence gave way"""
    found: list[list[int]] = [[]] * 12
    async with Engine(model_path=str(folder), **(OPTIONS | options)) as engine:

        async def ask(i: int) -> None:
            prompt = STEM[: 4 * (i % 6)] + [i, 3, 2 * i]
            answer = await engine.generate(prompt, max_new_tokens=60, ignore_eos=True, **PARAMS[i % 4])
            found[i] = list(answer.token_ids)

        async with anyio.create_task_group() as tasks:
            for i in range(12):
                tasks.start_soon(ask, i)
            replica = engine._core.replicas[0]
            for kill in range(kills):
                while replica.scheduler.generated_tokens < 40 * (kill + 1):
                    await anyio.sleep(0.01)
                os.kill(replica.supervisor.ranks.pids[0], signal.SIGKILL)
        totals = replica.scheduler.totals
        return found, totals.steps, totals.preemptions


def of_draft(algorithm: str, folder: Path) -> dict[str, Any]:
    return {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(folder)}


async def test_answers_are_those_without_drafts(folders: dict[str, Path]) -> None:
    expected, steps, preemptions = await answers(folders["target"])
    assert preemptions > 0
    for algorithm, draft in (("STANDALONE", "target"), ("STANDALONE", "other"), ("EAGLE3", "head")):
        found, fewer, _ = await answers(folders["target"], **of_draft(algorithm, folders[draft]))
        assert found == expected
        if draft == "target":
            assert fewer < steps * 0.8


@pytest.mark.parametrize(
    ("family", "num_layers", "options"),
    [
        ("qwen3_next", 1, {}),
        ("qwen3_next", 1, {"tensor_parallel_size": 2}),
        ("deepseek_v3", 3, {"enable_multi_layer_eagle": True}),
    ],
)
async def test_next_token_layers(
    family: str, num_layers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Of a model with recurrent layers, and several that draft in turn."""
    folder = add_next_token_layers(make_checkpoint(family, tmp_path / "model"), num_layers)
    expected, _, preemptions = await answers(folder)
    assert preemptions > 0
    found, _, _ = await answers(folder, speculative_algorithm="NEXTN", **options)
    assert found == expected


async def test_on_two_ranks(folders: dict[str, Path]) -> None:
    expected, _, _ = await answers(folders["target"])
    for algorithm, draft in (("STANDALONE", "target"), ("EAGLE3", "head")):
        drafts = of_draft(algorithm, folders[draft])
        found, _, _ = await answers(folders["target"], tensor_parallel_size=2, **drafts)
        assert found == expected


async def test_when_ranks_die(folders: dict[str, Path]) -> None:
    expected, _, _ = await answers(folders["target"])
    found, _, _ = await answers(folders["target"], kills=2, **of_draft("EAGLE3", folders["head"]))
    assert found == expected


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"vocab_size": 300}, "vocabulary of 300 tokens, and the model one of 259"),
        ({}, "tokenizer is another one"),
    ],
)
def test_another_vocabulary_is_refused(
    folders: dict[str, Path], draft: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama", tmp_path, **draft)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"id": 258', '"id": 259'))
    with pytest.raises(StartError, match=message):
        Engine(model_path=str(folders["target"]), **(OPTIONS | of_draft("STANDALONE", folder)))


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
async def test_a_draft_model_with_recurrent_layers(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also behind cached prefixes, of which it has no states, and on two ranks."""
    draft = make_checkpoint(family, tmp_path / family)
    expected, _, preemptions = await answers(folders["target"])
    assert preemptions > 0
    for options in ({}, {"tensor_parallel_size": 2}):
        found, _, _ = await answers(folders["target"], **(of_draft("STANDALONE", draft) | options))
        assert found == expected


def test_trees_of_a_draft_model_with_recurrent_layers_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    trees = {"speculative_eagle_topk": 2, "speculative_num_steps": 2, "speculative_num_draft_tokens": 5}
    draft = of_draft("STANDALONE", make_checkpoint("lfm2", tmp_path))
    with pytest.raises(StartError, match="--speculative-eagle-topk 2 .* has recurrent layers"):
        Engine(model_path=str(folders["target"]), **(OPTIONS | draft | trees))


async def test_an_encrypted_draft_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its config.json is elsewhere, in the clear."""
    for algorithm, name in (("STANDALONE", "other"), ("EAGLE3", "head")):
        folder, decrypted = tmp_path / name, tmp_path / f"{name}.json"
        shutil.copytree(folders[name], folder)
        shutil.move(folder / "config.json", decrypted)
        (folder / "config.json").write_bytes(b"\x93encrypted")
        options = OPTIONS | of_draft(algorithm, folder)
        with pytest.raises(StartError, match=r"config\.json cannot be read"):
            await Engine(model_path=str(folders["target"]), **options).__aenter__()
        plain = Engine(model_path=str(folders["target"]), **OPTIONS)
        drafting = Engine(
            model_path=str(folders["target"]), decrypted_draft_config_file=str(decrypted), **options
        )
        async with plain, drafting:
            first, second = [
                await one.generate(STEM, max_new_tokens=12, temperature=0.0, ignore_eos=True)
                for one in (plain, drafting)
            ]
        assert list(first.token_ids) == list(second.token_ids)
