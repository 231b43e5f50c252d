"""Quantised models over several ranks, in processes of their own: what one rank answers, in less memory on
each."""

from pathlib import Path

import pytest

from tests.devices.cpu.ranks import RunRanks
from tests.models.make import make_checkpoint
from tests.models.quantise import quantise


def written(formats: list[str], family: str, index: Path, **overrides: object) -> list[Path]:
    plain = make_checkpoint(family, index / "plain", **overrides)
    for i, name in enumerate(formats):
        quantise(plain, index / str(i), name)
    return [index / str(i) / "quantised" for i in range(len(formats))]


def test_weights_alone_are_split_exactly(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Groups of 16 inputs over 96 and 64; orders of their own; words of codes along either side."""
    formats = ["awq", "gptq", "gptq order", "gptq 8 v2", "ct int4 zeros", "ct int8 order", "ct fp8 weights"]
    folders = written(formats, "qwen2", tmp_path, num_hidden_layers=1)
    (alone,), ranks = run_ranks(1, folders, tmp_path), run_ranks(2, folders, tmp_path)
    for one, zero, other in zip(alone, *ranks, strict=True):
        assert zero["tokens"] == one["tokens"] and zero["logprobs"] == pytest.approx(
            one["logprobs"], abs=2e-3
        )
        assert zero["bytes"] == other["bytes"] < 0.8 * one["bytes"]


def test_static_activations_are_split_exactly(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Ranks round alike, and what a checkpoint adds once is added once. Sums of integers do not depend on the
    split."""
    folders = written(
        ["fp8 static", "ct int8 static", "modelslim W8A8"], "qwen2", tmp_path, num_hidden_layers=1
    )
    (alone,), ranks = run_ranks(1, folders, tmp_path), run_ranks(2, folders, tmp_path)
    for one, zero, _ in zip(alone, *ranks, strict=True):
        assert zero["tokens"] == one["tokens"] and zero["logprobs"] == pytest.approx(
            one["logprobs"], abs=1e-2
        )


def test_experts_are_spread_and_split(tmp_path: Path, run_ranks: RunRanks) -> None:
    folders = written(
        ["awq", "ct fp8 weights"], "qwen3_moe", tmp_path, num_hidden_layers=1, moe_intermediate_size=32
    )
    (alone,) = run_ranks(1, folders, tmp_path)
    for ep_size in (1, 2):
        for one, zero, _ in zip(alone, *run_ranks(2, folders, tmp_path, ep_size), strict=True):
            assert zero["tokens"] == one["tokens"] and zero["logprobs"] == pytest.approx(
                one["logprobs"], abs=2e-3
            )
            assert zero["bytes"] < 0.75 * one["bytes"]


@pytest.mark.parametrize("name", ["fp8", "fp8 block", "modelslim W4A8_DYNAMIC"])
def test_what_ranks_round_for_themselves_stays_near(name: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    """A rank that has some of the inputs of a row layer finds another largest value among them: answers are
    near, not the same."""
    (folder,) = written([name], "deepseek_v3", tmp_path, num_hidden_layers=2, moe_intermediate_size=32)
    (((one,)),) = run_ranks(1, [folder], tmp_path)
    (zero,), (other,) = run_ranks(2, [folder], tmp_path)
    assert zero["bytes"] == other["bytes"] < 0.8 * one["bytes"]
    assert zero["logprobs"][0] == pytest.approx(one["logprobs"][0], abs=0.3) and zero["last"] == other["last"]


def test_rows_travel_as_experts_round_them(tmp_path: Path, run_ranks: RunRanks) -> None:
    """The same ranks with and without: only what travels differs."""
    (folder,) = written(
        ["modelslim W8A8_DYNAMIC"], "qwen3_moe", tmp_path, num_hidden_layers=1, moe_intermediate_size=32
    )
    (plain, _), (sent, other) = (
        run_ranks(2, [folder], tmp_path, 2),
        run_ranks(2, [folder], tmp_path, 2, mode="auto"),
    )
    assert sent[0]["tokens"] == plain[0]["tokens"] and sent[0]["last"] == other[0]["last"]
    assert sent[0]["logprobs"] == pytest.approx(plain[0]["logprobs"], abs=2e-3)
