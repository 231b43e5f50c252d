"""Ranks that share prompts against transformers, for each kind of attention: tokens, prefixes and drafts."""

from pathlib import Path
from typing import Any

import pytest

from runtime.messages.prompt_split import PromptSplit
from runtime.messages.ranks import StepOverlap
from runtime.scheduling.drafts import Draft
from tests.devices.drive import Planner, sampling
from tests.devices.prompt_ranks import PromptRanks
from tests.models.compare import Checkpoints, in_company, maker, open_checkpoints, random_prompts

NUM_TOKENS = 10
PROMPTS = random_prompts(1, 9, 30, 290)  # one has more queries than a tile of attention, in each part
FAMILIES = (
    "cohere2",  # a feed-forward in parallel with attention, and windows
    "deepseek_v2",
    "deepseek_v3",
    "exaone4",
    "gemma2",  # caps
    "gpt_oss",  # sinks
    "llama",
    "llama4",  # chunks
    "mistral4",  # latents, and scales by position
    "olmo2",  # norms of projections
    "qwen3_moe",
    "smollm3",
    "step3",  # gates
)
SPLITS: list[tuple[str, PromptSplit]] = [
    *((family, "in-seq-split") for family in FAMILIES),
    ("deepseek_v32", "in-seq-split"),
    ("deepseek_v32", "round-robin-split"),
    ("glm_moe_dsa", "round-robin-split"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    cases = {family: (family, dict[str, object]()) for family, _ in SPLITS}
    return open_checkpoints(tmp_path_factory, maker(cases), PROMPTS, NUM_TOKENS)


def opened(folder: Path, size: int, split: PromptSplit, **options: Any) -> tuple[PromptRanks, Planner]:
    ranks = PromptRanks(folder, size, split, max_len=512, page_size=4, max_total_tokens=2048, **options)
    return ranks, Planner(ranks, ranks.ready, 4)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("family", "split"), SPLITS)
def test_tokens_are_those_of_transformers(
    family: str, split: PromptSplit, size: int, checkpoints: Checkpoints
) -> None:
    """Sequences join while others decode, with prompts in chunks that end anywhere."""
    folder, _, expected = checkpoints(family)
    ranks, planner = opened(folder, size, split)
    assert in_company(planner, PROMPTS, NUM_TOKENS, chunk=263) == expected
    assert len({len(shares) for shares in ranks.shares}) == 1
    for shares in zip(*ranks.shares, strict=True):
        num_tokens = shares[0][0]
        if num_tokens > 200:  # a chunk of the longest prompt, and at most three decodes
            assert all(abs(own - num_tokens / size) <= 4 for _, own in shares)
    assert any(own < count for count, own in ranks.shares[0])
    ranks.close()


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("deepseek_v3", "in-seq-split"),
        ("deepseek_v32", "round-robin-split"),
        ("gemma2", "in-seq-split"),
        ("llama", "in-seq-split"),
    ],
)
def test_parts_of_two_micro_batches(family: str, split: PromptSplit, checkpoints: Checkpoints) -> None:
    """Each micro-batch is divided into parts, also where a prompt is in both."""
    folder, _, expected = checkpoints(family)
    ranks, planner = opened(folder, 2, split, overlap=StepOverlap(two_batches=True))
    assert in_company(planner, PROMPTS, NUM_TOKENS, chunk=263) == expected
    for shares in zip(*ranks.shares, strict=True):
        num_tokens = shares[0][0]
        if num_tokens > 200:
            assert all(abs(own - num_tokens / 2) <= 5 for _, own in shares)
    assert ranks.num_cut > 20 and any(own < count for count, own in ranks.shares[0])
    ranks.close()


@pytest.mark.parametrize("split", ["in-seq-split", "round-robin-split"])
def test_prefixes_and_drafts(split: PromptSplit, checkpoints: Checkpoints) -> None:
    """A prompt behind a cached prefix, in one step with a row that verifies drafts and one that decodes."""
    folder, reference, expected = checkpoints("deepseek_v32")
    ranks, planner = opened(folder, 2, split)
    first, second = (planner.row(slot, PROMPTS[slot + 2], sampling()) for slot in (0, 1))
    for row in (first, second):
        planner.prefill(row)
    prompt = [*PROMPTS[3][:200], *PROMPTS[2]]
    third = planner.row(2, prompt, sampling(), prefix=second, shared=200)
    right, wrong = expected[2][1], 5
    planner.run([second], [(third, 30)], [(first, Draft([right, wrong]))])
    assert ranks.shares[0][-1][0] == 1 + 3 + 30 and ranks.shares[0][-1][1] == 1 + 3 + 15
    assert first.tokens[first.prompt_len :] == expected[2][: len(first.tokens) - first.prompt_len]
    assert len(first.tokens) - first.prompt_len >= 3
    while len(third.tokens) - third.prompt_len < NUM_TOKENS:
        planner.run([third, second], [])
    assert third.tokens[third.prompt_len :] == reference.greedy(prompt, NUM_TOKENS)
    assert second.tokens[second.prompt_len :][:NUM_TOKENS] == expected[3]
    ranks.close()
