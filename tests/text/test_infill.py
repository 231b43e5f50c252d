"""Fill-in-the-middle formats."""

from pathlib import Path

import pytest

from runtime.errors import OptionsError
from runtime.text.infill import FORMATS, find_format, infill

QWEN = {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|im_start|>"}


def test_a_model_is_known_by_its_tokens() -> None:
    assert find_format("auto", QWEN.__contains__) == FORMATS["qwen_coder"]
    assert find_format("auto", (QWEN - {"<|fim_suffix|>"}).__contains__) is None
    assert find_format("star_coder", QWEN.__contains__) == FORMATS["star_coder"]  # who names one knows better


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("star_coder", "<fim_prefix>def f({suffix}<fim_suffix>)<fim_middle>"),
        ("codestral", "[SUFFIX])[PREFIX]def f({suffix}"),
    ],
)
def test_texts_stand_as_they_are(name: str, text: str) -> None:
    assert infill(FORMATS[name], "def f({suffix}", ")") == text


def test_a_format_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "format.txt"
    file.write_text("<a>{suffix}<b>{prefix}<c>\n")
    assert infill(find_format(str(file), QWEN.__contains__) or "", "1", "2") == "<a>2<b>1<c>"


@pytest.mark.parametrize("text", ["<a>{prefix}", "{prefix}{suffix}{suffix}", ""])
def test_a_file_without_the_two_places_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "format.txt"
    file.write_text(text)
    with pytest.raises(OptionsError, match="once each"):
        find_format(str(file), QWEN.__contains__)
    with pytest.raises(OptionsError, match="none of star_coder"):
        find_format(str(tmp_path / "missing"), QWEN.__contains__)
