"""--enable-return-routed-experts needs experts, and one rank that routes all tokens."""

import json
from pathlib import Path

import pytest

from runtime.errors import OptionsError
from runtime.models.config.model_config import read_config
from runtime.options.parse import from_argv
from runtime.options.resolve import resolve
from tests.options.test_ascend import CPU, HF, MACHINE, MODEL

FLAG = "--enable-return-routed-experts"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", ""),
        ("--tensor-parallel-size 2", ""),
        ("--pipeline-parallel-size 2", "without --pipeline-parallel-size"),
        ("--tensor-parallel-size 2 --moe-a2a-backend deepep", "without --moe-a2a-backend"),
        (
            "--tensor-parallel-size 2 --data-parallel-size 2 --enable-dp-attention",
            "without --enable-dp-attention",
        ),
    ],
)
def test_ranks(words: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    options = from_argv([FLAG, *words.split()])
    if not problem:
        assert resolve(options, read_config(str(tmp_path)), CPU, MACHINE).api.enable_return_routed_experts
        return
    with pytest.raises(OptionsError, match=problem):
        resolve(options, read_config(str(tmp_path)), CPU, MACHINE)


def test_a_model_without_experts() -> None:
    with pytest.raises(OptionsError, match="this model has none"):
        resolve(from_argv([FLAG]), MODEL, CPU, MACHINE)
