"""The table of splits: every split has a row, cells say what a run found, and what is not run stays."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.matrix_checks import Refused
from tests.models.matrix_table import NOT_RUN, Row
from tests.splits import matrix
from tests.splits.checks import CHECKS, Bench
from tests.splits.splits import SPLITS, Options

SAMPLE = (
    ("--tp-size 2 --ep-size 2", "Qwen3-MoE"),
    ("--tp-size 2 --pp-size 2", "Jamba"),
    ("--pp-size 2 --dp-size 2", "DeepSeek V3"),
    ("--tp-size 2 --nnodes 2", "Gemma 2"),
    ("--tp-size 2 --moe-a2a-backend deepep", "Llama"),
    ("--pp-size 3", "null"),
    ("--tp-size 2", "graphs"),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, forked_children: None) -> Iterator[Bench]:
    found = Bench(tmp_path_factory.mktemp("splits"))
    yield found
    found.close()


def test_every_split_stands_in_the_table() -> None:
    rows = matrix.PAGE.read_rows()
    assert list(rows) == list(SPLITS), "run ./dev test-splits"
    assert all(list(row.cells) == list(CHECKS) for row in rows.values())
    assert set(rows["one rank"].cells.values()) <= {"yes", NOT_RUN}


@pytest.mark.parametrize(("split", "column"), SAMPLE)
def test_a_cell_is_what_the_page_has(split: str, column: str, bench: Bench) -> None:
    assert matrix.run_cell(bench, split, column) == (matrix.PAGE.read_rows()[split].cells[column], "")


@pytest.mark.full
@pytest.mark.parametrize("column", [column for column in CHECKS if column != "npu"])
@pytest.mark.parametrize("split", SPLITS)
def test_every_cell(split: str, column: str, bench: Bench) -> None:
    assert matrix.run_cell(bench, split, column) == (matrix.PAGE.read_rows()[split].cells[column], "")


def test_a_cell_says_yes_only_where_something_was_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(bench: Bench, split: Options) -> bool:
        raise Refused("not with this")

    def fail(bench: Bench, split: Options) -> bool:
        raise AssertionError("other tokens")

    checks = {"works": lambda *_: True, "nothing": lambda *_: False, "refused": refuse, "fails": fail}
    monkeypatch.setattr(matrix, "CHECKS", checks)
    found = {name: matrix.run_cell(bench, "one rank", name) for name in checks}
    assert found["works"] == ("yes", "") and found["nothing"] == (NOT_RUN, "")
    assert found["refused"] == ("not with this", "")
    cell, problem = found["fails"]
    assert cell == NOT_RUN and "one rank, fails" in problem and "other tokens" in problem


def test_other_tokens_are_a_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench.expected("Llama")
    wrong = [[*tokens[:-1], tokens[-1] ^ 1] for tokens in made.tokens]
    monkeypatch.setitem(bench._made, "Llama", made._replace(tokens=wrong))
    cell, problem = matrix.run_cell(bench, "one rank", "Llama")
    assert cell == NOT_RUN and "AssertionError" in problem


def test_what_is_not_run_stays() -> None:
    old = {"--tp-size 2": Row("--tp-size 2", {"Llama": "yes", "npu": "yes", "gone": "yes"})}
    rows = {row.name: row for row in matrix.merged({"--tp-size 2": {"Llama": "no room"}}, old)}
    assert list(rows) == list(SPLITS) and list(rows["--pp-size 2"].cells) == list(CHECKS)
    assert rows["--tp-size 2"].cells["Llama"] == "no room" and rows["--tp-size 2"].cells["npu"] == "yes"
    assert "gone" not in rows["--tp-size 2"].cells
    assert set(rows["--pp-size 2"].cells.values()) == {NOT_RUN}


def test_a_name_that_is_no_split(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["matrix", "--tp-size 5", "--columns", "null"])
    with pytest.raises(SystemExit):
        matrix.main()
    assert "there is no --tp-size 5; there are 'one rank', '--tp-size 2'" in capsys.readouterr().err
    assert Path(matrix.PAGE.path).name == "parallelism.md"
