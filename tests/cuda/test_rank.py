"""Ranks and servers on a GPU: greedy output equals transformers', with graphs, chunks, company, host memory
and a short memory."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import runtime
from runtime.messages.ranks import CompileConfig
from runtime.ranks import compile as compiling
from tests.devices.drive import Planner, Row, page_copies, sampling, start
from tests.models.make import make_checkpoint
from tests.models.reference import Reference
from tests.models.test_llama import CASES, NUM_TOKENS, prompts

pytestmark = pytest.mark.cuda
SMALL: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_len": 256,
    "max_total_tokens": 4096,
    "memory_fraction": 0.5,
}
FAMILIES = ("llama", "mistral window", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "qwen3_moe", "llama3")
DENSE = ("llama", "mistral window", "qwen2", "qwen3", "llama3")  # whose steps must be graphs


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_equals_transformers(case: str, tmp_path: Path) -> None:
    """Sequences join one by one, in chunks, and leave: steps with and without graphs, some rows padding."""
    family, overrides = CASES[case]
    folder = make_checkpoint(family, tmp_path, **overrides)
    reference = Reference(folder)
    executor, ready = start(folder, page_size=16, graph_sizes=[2, 4], **SMALL)
    captured = [executor.capture(size).error for size in (2, 4)]
    assert case not in DENSE or captured == ["", ""]
    planner = Planner(executor, ready, 16)
    rows: list[Row] = []
    for slot, prompt in enumerate(prompts()):
        row = planner.row(slot, prompt, sampling())
        while row.computed < row.prompt_len:
            planner.run(rows, [(row, min(13, row.prompt_len - row.computed))])
        rows.append(row)
    while decodes := [row for row in rows if len(row.tokens) < row.prompt_len + NUM_TOKENS]:
        planner.run(decodes, [])
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts()]
    assert [row.tokens[row.prompt_len :][:NUM_TOKENS] for row in rows] == expected
    executor.close()


@pytest.mark.parametrize("case", ["llama", "mistral window", "deepseek_v2", "qwen3_moe"])
def test_piecewise_graphs(case: str, tmp_path: Path) -> None:
    """Chunks in steps with decode rows, with and without padding, and one step that is too large for the
    graphs."""
    family, overrides = CASES[case]
    folder = make_checkpoint(family, tmp_path, **overrides)
    executor, ready = start(folder, page_size=16, piecewise_sizes=[8, 16], **SMALL)
    assert [executor.capture(size, "tokens").error for size in (8, 16)] == ["", ""]
    planner = Planner(executor, ready, 16)
    rows: list[Row] = []
    for slot, prompt in enumerate(prompts()):
        row = planner.row(slot, prompt, sampling())
        while row.computed < row.prompt_len:
            planner.run(rows, [(row, min(13 + 4 * (slot == 3), row.prompt_len - row.computed))])
        rows.append(row)
    reference = Reference(folder)
    for row in rows:
        assert row.tokens[row.prompt_len :] == reference.greedy(
            row.tokens[: row.prompt_len], len(row.tokens) - row.prompt_len
        )
    executor.close()


def test_compiled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through inductor, without tuning products: decode steps and piecewise graphs."""
    monkeypatch.setattr(compiling, "HOW", {"backend": "inductor"})
    folder = make_checkpoint("qwen3", tmp_path)
    executor, ready = start(
        folder,
        page_size=16,
        graph_sizes=[2],
        piecewise_sizes=[16],
        **SMALL,
        compiled=CompileConfig(max_rows=2, is_piecewise=True),
    )
    assert (executor.capture(2).error, executor.capture(16, "tokens").error) == ("", "")
    planner = Planner(executor, ready, 16)
    row = planner.row(0, [5, 9, 100, 7], sampling())
    planner.prefill(row)
    for _ in range(10):
        planner.run([row], [])
    assert row.tokens[4:] == Reference(folder).greedy([5, 9, 100, 7], 11)
    executor.close()


def test_random_tokens_are_the_cpus(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    requests = [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.9, "top_p": 0.8, "seed": 4},
        {"temperature": 1.5, "top_k": 5, "seed": 5},
        {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 6},
    ]
    found = []
    for device in ("cpu", "cuda"):
        executor, ready = start(
            folder, page_size=16, **SMALL | {"device": device, "graph_sizes": [4] if device == "cuda" else []}
        )
        if device == "cuda":
            assert executor.capture(4).error == ""
        planner = Planner(executor, ready, 16)
        rows = [
            planner.row(slot, [5, 9, 100, 7], sampling(**request)) for slot, request in enumerate(requests)
        ]
        planner.run([], [(row, 4) for row in rows])
        for _ in range(20):
            planner.run(rows, [])
        found.append([row.tokens for row in rows])
        executor.close()
    assert found[0] == found[1]


def test_steps_in_flight(tmp_path: Path) -> None:
    """Each is launched before the result of the one before: with graphs and without, the tokens are the
    same."""
    folder = make_checkpoint("qwen3", tmp_path)
    expected = Reference(folder).greedy([5, 9, 100], 30)
    for sizes in ([], [1]):
        executor, ready = start(folder, page_size=16, graph_sizes=sizes, **SMALL)
        for size in sizes:
            assert executor.capture(size).error == ""
        planner = Planner(executor, ready, 16)
        row = planner.row(0, [5, 9, 100], sampling())
        planner.prefill(row)
        steps = [executor.launch(planner.plan([row], [])) for _ in range(29)]
        results = [step.result() for step in steps]
        assert [int(result.token_ids[0]) for result in results if result is not None] == expected[1:]
        executor.close()


def test_pages_go_to_host_memory_and_come_back(tmp_path: Path) -> None:
    fd = os.memfd_create("host-test")
    folder = make_checkpoint("qwen3", tmp_path)
    prompt = list(range(1, 41))
    expected = Reference(folder).greedy(prompt, 8)
    executor, ready = start(folder, page_size=16, host_ratio=1.0, host_fds=[fd], **SMALL)
    planner = Planner(executor, ready, 16)
    first = planner.row(0, prompt, sampling())
    planner.prefill(first)
    planner.page_copies = page_copies(saves={first.pages[0]: 5, first.pages[1]: 9})
    planner.run([first], [])
    again = planner.row(1, prompt, sampling())
    again.pages, again.computed = [planner.free.pop(), planner.free.pop()], 32
    planner.page_copies = page_copies(loads={5: again.pages[0], 9: again.pages[1]})
    while len(again.tokens) < len(prompt) + 8:
        planner.run(
            [again] if again.computed >= len(prompt) else [],
            [] if again.computed >= len(prompt) else [(again, 8)],
        )
    assert again.tokens[len(prompt) :] == expected
    executor.close()
    os.close(fd)


def test_pages_leave_room_for_the_largest_step(tmp_path: Path) -> None:
    """With nearly all of the GPU's memory for weights and pages."""
    folder = make_checkpoint(
        "qwen3",
        tmp_path,
        max_position_embeddings=8192,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    )
    executor, ready = start(
        folder,
        page_size=16,
        **SMALL
        | {
            "memory_fraction": 0.99,
            "max_total_tokens": None,
            "max_len": 8192,
            "max_slots": 4096,
            "max_step_tokens": 12_000,
        },
    )
    assert ready.pages_bytes > 0.8 * torch.cuda.get_device_properties(0).total_memory, (
        "else this proves nothing"
    )
    planner = Planner(executor, ready, 16)
    prompt = (np.arange(4000) % 250).tolist()
    rows = [planner.row(slot, prompt, sampling(temperature=1.0, top_p=0.9)) for slot in range(3)]
    assert planner.run([], [(row, 4000) for row in rows]) is not None
    executor.close()


@pytest.mark.anyio
async def test_the_library_and_its_captures(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    expected = Reference(folder).greedy([5, 9, 100], 40)
    async with runtime.Engine(
        model_path=str(folder),
        device="cuda",
        dtype="float32",
        context_length=256,
        max_total_tokens=4096,
        cuda_graph_bs=[1, 2],
    ) as engine:
        for _ in range(3):
            answer = await engine.generate([5, 9, 100], temperature=0, max_new_tokens=40, ignore_eos=True)
            assert answer.token_ids == expected
