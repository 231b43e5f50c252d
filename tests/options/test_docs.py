"""What is generated from the table is fresh and whole."""

import re
from pathlib import Path

import msgspec
import pytest

import runtime
from runtime.errors import OptionsError
from runtime.options.compat.environment import ENVIRONMENT
from runtime.options.docs import REMOVED, as_object, markdown, schema
from runtime.options.help import help_text, markdown_table
from runtime.options.table import foreign_rows, rows
from tests.options.test_table import REFERENCE

EVERY = (*rows(), *foreign_rows())


def test_tests_that_the_page_on_speculation_names_are_there() -> None:
    root = Path(runtime.__file__).parents[1]
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", (root / "docs" / "speculation.md").read_text()))
    assert len(named) > 10 and [name for name in named if not (root / name).is_file()] == []


def test_docs_are_fresh() -> None:
    path = Path(runtime.__file__).parents[1] / "docs" / "options.md"
    assert path.read_text() == markdown(), "run: runtime options --markdown > docs/options.md"


def test_docs_name_everything() -> None:
    text = markdown()
    assert all(f"`{row.flag}`" in text for row in EVERY)
    assert all(forbidden in text for forbidden, _ in REMOVED)
    assert all(setting.name in text for setting in ENVIRONMENT)


def test_every_environment_setting_has_a_place() -> None:
    assert {setting.name for setting in ENVIRONMENT} >= set(REFERENCE["environment"])
    assert all(setting.counterpart and setting.about for setting in ENVIRONMENT)
    assert all(setting.probe.startswith("/") for setting in ENVIRONMENT if setting.kind == "machine")


def test_objects_are_json() -> None:
    decoded = msgspec.json.decode(msgspec.json.encode([as_object(row) for row in EVERY]))
    assert len(decoded) == len(EVERY)
    assert all(
        {"flag", "aliases", "group", "type", "default", "choices", "status", "note"} <= one.keys()
        for one in decoded
    )


def test_schema_follows_the_table() -> None:
    properties = schema()["properties"]
    assert properties["page-size"]["default"] == "auto" and properties["page-size"]["anyOf"]
    assert properties["port"]["maximum"] == 65535 and properties["disable-radix-cache"]["type"] == "boolean"
    assert "tool-server" not in properties and "config" not in properties
    assert schema()["additionalProperties"] is False


def test_help_shows_what_works_and_where_the_rest_is() -> None:
    text = help_text()
    assert "--page-size int|auto" in text and "--tool-server" not in text
    assert f"{sum(not row.acts for row in EVERY)} further options" in text
    assert max(map(len, text.splitlines())) <= 140


def test_help_of_a_group_shows_all_with_status() -> None:
    text = help_text(["lora"])
    assert "--enable-lora-overlap-loading\n      [superseded]" in text
    assert "--max-lora-chunk-size 16|32|64|128\n      [other-device]" in text
    assert "--page-size" not in text
    assert "--concurrency-limit" in help_text(["rtp_llm"])
    with pytest.raises(OptionsError, match="did you mean memory"):
        help_text(["memry"])


def test_markdown_cells_are_escaped() -> None:
    assert markdown_table(["a"], [("x|y",)]) == "| a |\n| --- |\n| x\\|y |"
