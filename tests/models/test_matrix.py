"""The matrix of model families: every family has a row, cells say what a run found, and rows that are run
alone leave the others as they are."""

from pathlib import Path

import pytest

from runtime.models.config.registry import MODELS
from tests.models import matrix
from tests.models.layouts import ELSEWHERE
from tests.models.matrix_checks import CHECKS, Made, Refused
from tests.models.matrix_table import NOT_RUN, Page, Row, parse, render


def test_every_family_is_made_for_tests() -> None:
    for test in ELSEWHERE.values():
        assert (matrix.DOCS.parents[1] / test).is_file()
    assert matrix.families_without_rows() == [], (
        "add a row to FAMILIES of make.py, or to LAYOUTS of layouts.py"
    )


def test_every_family_stands_in_the_table() -> None:
    rows = matrix.PAGE.read_rows()
    lacking = set(matrix.all_rows().values()) - rows.keys()
    assert not lacking, f"run ./dev test-models for {', '.join(sorted(lacking))}"
    assert rows.keys() <= MODELS.keys()
    assert all(list(row.cells) == list(CHECKS) and row.cells["alone"] == "yes" for row in rows.values())


@pytest.mark.parametrize("family", ["phi3", "mamba2", "hunyuan_moe"])
def test_a_row_is_what_the_page_has(family: str) -> None:
    checks = tuple(name for name in CHECKS if name != "two ranks")  # processes of their own
    row, problems = matrix.run_row(family, checks)
    assert not problems
    kept = matrix.PAGE.read_rows()[row.name].cells
    assert row.cells == kept | {"two ranks": NOT_RUN}


def test_a_cell_says_yes_only_where_something_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(made: Made) -> bool:
        raise Refused("not with this")

    def fail(made: Made) -> bool:
        assert made.expected.tokens == [], "other tokens"
        return True

    checks = {"works": lambda made: True, "nothing": lambda made: False, "refused": refuse, "fails": fail}
    monkeypatch.setattr(matrix, "CHECKS", checks)
    row, problems = matrix.run_row("llama", tuple(checks))
    assert row.cells == {"works": "yes", "nothing": NOT_RUN, "refused": "not with this", "fails": NOT_RUN}
    assert "llama, fails" in problems and "other tokens" in problems and "works" not in problems


def test_rows_are_read_back_and_others_stay(tmp_path: Path) -> None:
    page = Page(tmp_path / "models.md", "a command", "name")
    page.path.write_text(f"before\n{page.begin}\n{page.end}\nbehind\n")
    a, b = Row("A", {"x": "yes", "y": "no room"}), Row("B", {"x": "no room", "y": NOT_RUN})
    page.write_rows([a, b])
    written = page.path.read_text()
    assert written.startswith("before\n") and written.endswith("behind\n")
    assert "| name | x | y |\n| --- | --- | --- |\n" in written
    assert "| `A` | yes | refused [1] |\n| `B` | refused [1] | – |\n\n1. no room\n" in written
    better = a._replace(cells={"x": "yes", "y": "yes"})
    page.write_rows(list((page.read_rows() | {"A": better}).values()))
    assert page.read_rows() == {"A": better, "B": b}
    assert parse(render([], ["x"], "name"))[0] == {}
    page.path.write_text("no marker")
    with pytest.raises(ValueError, match="are missing"):
        page.write_rows([a])
