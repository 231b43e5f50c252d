"""docs/security.md names tests that exist, and every published hole of the list."""

import ast
import re

import pytest

from tests.shape import source

PAGE = (source.ROOT / "docs" / "security.md").read_text("utf-8")
ROWS = [line for line in PAGE.splitlines() if "`tests/" in line]
# published holes of servers of this kind: SGLang, vLLM, TGI, LMDeploy, llama.cpp, Ollama, Meta's
PUBLISHED = {
    2024: (11041, 50050),
    2025: (
        *(10164, 24357, 25183, 29770, 29783, 30202, 32444, 46560, 46570, 46722, 47277, 48887, 48942, 48943),
        *(48944, 48956, 49847, 59425, 61620, 62164, 62372, 62426, 6242, 63389, 66448),
    ),
    2026: (
        *(599, 3059, 3060, 3989, 5497, 5760, 7304, 9540, 22773, 22778, 22807, 24779, 27893, 33626, 46432),
    ),
}


def test_every_published_hole_has_a_row_with_tests() -> None:
    rows = [row for row in ROWS if "CVE-" in row]
    answered = {name for row in rows for name in re.findall(r"CVE-\d+-\d+", row)}
    assert answered == {
        f"CVE-{year}-{number:04}" for year, numbers in PUBLISHED.items() for number in numbers
    }


@pytest.mark.parametrize(
    "named", sorted({name for row in ROWS for name in re.findall(r"`(tests/[^`]+\.py[^`]*)`", row)})
)
def test_tests_that_the_page_names_exist(named: str) -> None:
    file, _, function = named.partition("::")
    assert (source.ROOT / file).is_file(), file
    functions = {
        node.name
        for node in ast.walk(ast.parse((source.ROOT / file).read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not function or function in functions, named
