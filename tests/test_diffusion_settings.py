"""How a diffusion model's blocks are filled in, from options, config.json and a file; and what is refused."""

from pathlib import Path

import pytest

from runtime.diffusion_settings import diffusion, model_defaults
from runtime.errors import ModelError, OptionsError
from runtime.models.config.diffusion_families import DIFFUSION, BlockDiffusion
from runtime.options.facts import device_facts
from runtime.options.parse import from_argv
from runtime.options.plan import Plan
from runtime.options.resolve import resolve
from runtime.scheduling.diffusion.algorithms import Diffusion, JointThreshold, LowConfidence
from tests.options.test_plan import MACHINE, Model


class Blocks(Model):
    diffusion = BlockDiffusion(block_size=32, mask_id=9)


def plan(words: str, model: type[Model] = Blocks) -> Plan:
    parsed = from_argv(words.split())
    return resolve(parsed, model, device_facts(parsed.options.parallel.device), MACHINE)


def settings(words: str, text: str | None, folder: Path) -> Diffusion | None:
    if text is not None:
        (folder / "a.yaml").write_text(text)
        words += f" --dllm-algorithm-config {folder / 'a.yaml'}"
    return diffusion(plan(words), Blocks)  # type: ignore[arg-type]


def test_an_algorithm_and_its_file(tmp_path: Path) -> None:
    found = settings("--device cpu --dllm-algorithm LowConfidence", None, tmp_path)
    assert found == Diffusion(algorithm=LowConfidence(), size=32, mask_id=9)
    text = "block_size: 8\nthreshold: 0.4\npenalty_lambda: 1.5\n"
    found = settings("--device cpu --dllm-algorithm JointThreshold", text, tmp_path)
    algorithm = JointThreshold(block_size=8, threshold=0.4, penalty_lambda=1.5)
    assert found == Diffusion(algorithm=algorithm, size=8, mask_id=9) and algorithm.repeat_penalty == 1.5
    assert settings("--device cpu --dllm-algorithm LowConfidence", "", tmp_path) is not None, "an empty file"


def test_steps_are_not_planned_ahead() -> None:
    assert plan("--device cpu --dllm-algorithm LowConfidence").steps_in_flight == 1
    assert plan("--device cpu", Model).steps_in_flight == 2


@pytest.mark.parametrize(
    ("words", "text", "problem"),
    [
        ("", "threshold: 2", "threshold"),
        ("", "edit_threshold: 0.5", "unknown field `edit_threshold`"),
        ("", "- 1", "is none of LowConfidence"),
        ("--page-size 48", None, "is no multiple of the blocks of 32 tokens; choose --page-size 32"),
        ("", "block_size: 24", "32 is no multiple of the blocks of 24 tokens; choose --page-size 24"),
        ("--chunked-prefill-size 16", None, "is less than a block of 32 tokens"),
    ],
)
def test_settings_that_cannot_be(words: str, text: str | None, problem: str, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=problem):
        settings(f"--device cpu --dllm-algorithm LowConfidence {words}", text, tmp_path)


def test_a_file_that_is_not_there() -> None:
    words = "--device cpu --dllm-algorithm LowConfidence --dllm-algorithm-config /nowhere/a.yaml"
    with pytest.raises(OptionsError, match="/nowhere/a.yaml cannot be read: No such file"):
        diffusion(plan(words), Blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "model", "problem"),
    [
        ("--device cpu --dllm-algorithm LowConfidence", Model, "is for diffusion models"),
        ("--device cpu", Blocks, "say how with --dllm-algorithm LowConfidence"),
        ("--device npu --dllm-algorithm LowConfidence", Blocks, "--device npu computes no diffusion models"),
        ("--device cpu --dllm-algorithm LowConfidence --tp 2 --pp-size 2", Blocks, "exclude one another"),
    ],
)
def test_what_is_refused(words: str, model: type[Model], problem: str) -> None:
    with pytest.raises(OptionsError, match=problem):
        plan(words, model)


def test_a_penalty_of_generation_config_is_left_out() -> None:
    class Generates(Blocks):
        sampling_defaults = {"temperature": 0.7, "repetition_penalty": 1.1}

    assert model_defaults(Generates()) == {"temperature": 0.7}  # type: ignore[arg-type]


def test_config_json_may_say_other_blocks() -> None:
    read = DIFFUSION["SDAR"].read
    assert read is not None
    raw = {"vocab_size": 152000}
    assert read(raw) == {"diffusion": BlockDiffusion(block_size=4, mask_id=151669)}
    raw |= {"block_size": 8, "mask_token_id": 7}
    assert read(raw) == {"diffusion": BlockDiffusion(block_size=8, mask_id=7)}
    with pytest.raises(ModelError, match="the mask is token 151669, outside of the vocabulary of 300"):
        read({"vocab_size": 300})
    prepare = DIFFUSION["LLaDA2MoeModelLM"].prepare
    assert prepare is not None and prepare({}) == {}
    with pytest.raises(ModelError, match="use_bias and use_qkv_bias are not supported"):
        prepare({"use_qkv_bias": True})
