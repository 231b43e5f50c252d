"""--enable-pdmux: its file in SGLang's form, and what it does not go with."""

from pathlib import Path
from typing import Any

import pytest

from runtime.errors import OptionsError
from runtime.messages.multiplexing import Multiplexing
from runtime.options.parse import from_argv, from_values
from runtime.options.resolve import plan_for
from runtime.pdmux_settings import multiplexing
from runtime.start import prepare

POCKET = str(Path(__file__).parents[1] / "runtime/pocket")
H200 = """
sm_group_num: 8
manual_divisions:
  - [112, 20, 1]
  - [104, 28, 5]
  - [96, 36, 10]
  - [80, 52, 15]
  - [64, 68, 20]
  - [56, 76, 25]
decode_bs_divisor: 36
split_forward_token_budget: 65536
"""


def found(text: str, folder: Path, **options: Any) -> Multiplexing | None:
    (file := folder / "pdmux.yaml").write_text(text)
    given = {"device": "cuda", "enable_pdmux": True, "pdmux_config_path": str(file)} | options
    return multiplexing(plan_for(from_values(given)))


def test_the_documented_file(tmp_path: Path) -> None:
    read = found(H200, tmp_path)
    assert read is not None and read.num_divisions == 6 and read.rows_divisor == 36
    assert [division.decodes for division in read.divisions(132, 8)] == [20, 28, 36, 52, 68, 76]
    assert read.choose(12, 6) == 2


def test_without_a_file(tmp_path: Path) -> None:
    plan = plan_for(from_values({"device": "cuda", "enable_pdmux": True, "sm_group_num": 5}))
    assert multiplexing(plan) == Multiplexing(num_divisions=3)
    assert multiplexing(plan_for(from_values({"device": "cuda"}))) is None
    assert found("", tmp_path) == Multiplexing()
    assert found("decode_bs_divisor: 9", tmp_path, sm_group_num=3) == Multiplexing(
        num_divisions=1, rows_divisor=9
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sm_group_num: 2", "Expected `int` >= 3"),
        ("manual_divisions: [[1, 2]]", "pdmux.yaml says no divisions"),
        ("manual_divisions: [[112, 20, 1]]", "1 manual_divisions, where sm_group_num 8 asks for 6"),
        ("sm_group_num: 4\nmanual_divisions: [[112, 20, 5], [96, 36, 5]]", "third numbers"),
        ("other: 1", "unknown field `other`"),
        ("- 1", "Expected `object`"),
        ("a: [", "says no divisions"),
    ],
)
def test_other_files_are_refused(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=reason):
        found(text, tmp_path)


def test_two_numbers_of_groups(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="--sm-group-num 6 and sm_group_num: 5 .* leave one out"):
        found("sm_group_num: 5", tmp_path, sm_group_num=6)


def test_a_start_reads_the_file() -> None:
    plan = plan_for(
        from_values(
            {
                "device": "cuda",
                "model_path": POCKET,
                "enable_pdmux": True,
                "pdmux_config_path": "/nowhere",
                "attention_backend": "triton",
            }
        )
    )
    with pytest.raises(OptionsError, match="--pdmux-config-path /nowhere cannot be read: No such file"):
        prepare(plan)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--enable-pdmux --device cpu", "--enable-pdmux"),
        ("--enable-pdmux --device npu", "--enable-pdmux"),
        ("--enable-pdmux --device cuda --tensor-parallel-size 2", "one card"),
        ("--enable-pdmux --device cuda --kernel-fusion all", "--kernel-fusion off or safe"),
        ("--enable-pdmux --device cuda --enable-decode-work-list", "--enable-decode-work-list"),
        ("--enable-pdmux --device cuda --attention-backend flashinfer", "flashinfer"),
        ("--enable-pdmux --device cuda --enable-lora", "--enable-lora"),
        ("--sm-group-num 4 --device cuda", "--enable-pdmux"),
    ],
)
def test_what_it_does_not_go_with(words: str, reason: str) -> None:
    with pytest.raises(OptionsError, match=reason):
        plan_for(from_argv(["--model-path", POCKET, *words.split()]))
