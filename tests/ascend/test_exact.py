"""Greedy tokens of a rank on an NPU equal transformers' in fp32: chunks, prefix hits, company, pages of 128,
windows."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.devices.executor import Executor
from runtime.messages.requests import TokenBans
from runtime.text.token_bans import packed
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]

PAGE = 128
LATENT = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16}  # multiples of 16, as the cache wants them
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    # the form of the attention call depends on the head size
    "qwen3, heads of 128": ("qwen3", {"head_dim": 128}),
    "llama, heads of 128, one for all": ("llama", {"head_dim": 128, "num_key_value_heads": 1}),
    "mistral, windows": ("mistral", {"sliding_window": 150}),
    "mistral, windows, heads of 128": ("mistral", {"sliding_window": 70, "head_dim": 128}),
    "qwen2, experts": ("qwen2_moe", {}),
    "qwen3, experts": ("qwen3_moe", {}),
    "gpt-oss, sinks": ("gpt_oss", {}),
    "gpt-oss, sinks, heads of 128": ("gpt_oss", {"head_dim": 128}),
    "gemma 2, caps": ("gemma2", {"head_dim": 32}),
    "gemma 3": ("gemma3", {}),
    "bloom, biases of distance": ("bloom", {}),
    "deepseek 2": ("deepseek_v2", LATENT),
    "deepseek 3": ("deepseek_v3", LATENT),
    "deepseek 3.2": ("deepseek_v32", LATENT | {"index_head_dim": 32}),
    "glm 5": ("glm_moe_dsa", LATENT | {"index_head_dim": 32}),
    "deepseek 3, groups of 4": ("deepseek_v3", LATENT | {"n_group": 2, "topk_group": 1, "kv_lora_rank": 64}),
}
RANDOM = np.random.default_rng(3)
LONG, SHORT = RANDOM.integers(0, 255, 300).tolist(), RANDOM.integers(0, 255, 9).tolist()
BRANCH = [*LONG[: 2 * PAGE], 3, 4, 5]
COUNT = 8


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    return make_checkpoint(family, tmp_path_factory.mktemp("model"), **overrides)


@pytest.fixture
def fallbacks() -> Counter[str]:
    """Operators that an NPU leaves to the CPU, counted from now on."""
    import torch_npu

    assert torch_npu  # the simulation comes with it
    from tests.ascend.emulate.device import fallbacks

    fallbacks.clear()
    return fallbacks


def open_rank(folder: Path, **options: Any) -> tuple[Executor, Planner]:
    executor, ready = start(
        folder,
        **(
            {"device": "npu", "page_size": PAGE, "dtype": "float32", "max_len": 512, "max_total_tokens": 2048}
            | options
        ),
    )
    return executor, Planner(executor, ready, PAGE)


def test_tokens_are_those_of_transformers(folder: Path, fallbacks: Counter[str]) -> None:
    check_tokens(folder, fallbacks)


@pytest.mark.parametrize(
    "model", ["qwen3, heads of 128", pytest.param("mistral, windows, heads of 128", marks=pytest.mark.full)]
)
def test_pages_in_nz(model: str, tmp_path: Path, fallbacks: Counter[str]) -> None:
    family, overrides = MODELS[model]
    folder = make_checkpoint(family, tmp_path, **overrides)
    executor = check_tokens(folder, fallbacks, device_options={"nz_cache": True})
    assert executor.runner.device.ops.is_nz


def check_tokens(folder: Path, fallbacks: Counter[str], **options: Any) -> Executor:
    """Compares a long prompt in chunks beside decodes, one of them of a single token; then one that goes on
    from its first two pages."""
    executor, planner = open_rank(folder, **options)
    short, long = planner.row(2, SHORT, sampling()), planner.row(5, LONG, sampling())
    branch = planner.row(1, BRANCH, sampling(), prefix=long, shared=2 * PAGE)
    fallbacks.clear()  # loading may
    planner.run([], [(short, len(SHORT))])
    for count in (100, 1, 155, 44):
        planner.run([short], [(long, count)])
    branch.pages = long.pages[:2]
    planner.run([short, long], [(branch, 3)])
    while len(branch.tokens) < len(BRANCH) + COUNT:
        planner.run([short, branch, long], [])
    assert not fallbacks, "operators that an NPU leaves to the CPU"
    reference = Reference(folder)
    for row, prompt in ((short, SHORT), (long, LONG), (branch, BRANCH)):
        assert row.tokens[len(prompt) :][:COUNT] == reference.greedy(prompt, COUNT)
    executor.close()
    return executor


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.9, "top_p": 0.8, "seed": -(2**63)},
        {"temperature": 1.5, "top_k": 5, "min_p": 0.02},
        {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "seed": 1},
        {"top_logprobs": 3, "prompt_logprobs": 2},
        {"bias_ids": [3, 4], "bias_values": [2.5, -100.0], "stop_ids": [9], "min_len": 400},
        {"token_bans": TokenBans(packed(tuple(range(64))), ((3,), (5, 6), (7, 8, 9)))},
    ],
    ids=str,
)
def test_choices_do_not_depend_on_company(
    params: dict[str, Any], tmp_path: Path, fallbacks: Counter[str]
) -> None:
    """All sampling parameters work on the device; a sequence gets the same tokens alone and in a batch."""
    _, planner = open_rank(make_checkpoint("qwen3", tmp_path, num_hidden_layers=1))
    fallbacks.clear()
    alone = planner.generate(planner.row(0, SHORT, sampling(**params)), COUNT)
    company = planner.row(3, LONG, sampling(temperature=1.0, top_k=3, top_p=0.9))
    again = planner.row(4, SHORT, sampling(**params))
    planner.run([], [(company, len(LONG)), (again, len(SHORT))])
    for _ in range(COUNT - 1):
        planner.run([company, again], [])
    assert again.tokens[len(SHORT) :] == alone and not fallbacks
