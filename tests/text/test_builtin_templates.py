"""Which chat template the options choose."""

from pathlib import Path

import pytest

from runtime.errors import OptionsError
from runtime.messages.requests import Chat
from runtime.text.open_templates import chat_templates
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary
from tests.text import build

NAMED = Vocabulary(
    build.sentencepiece(), TokenizerFiles(templates={"default": "plain", "rag": "rag", "tool_use": "tools"})
)


def text(choice: str = "auto", name: str | None = None) -> str:
    return chat_templates(NAMED, choice, name).render(Chat([{"role": "user", "content": "U"}], tools=[{}]))


def test_a_name_of_the_tokenizer_wins_over_its_default(tmp_path: Path) -> None:
    assert (text(), text(name="rag"), text(name="default")) == ("tools", "rag", "plain")


def test_a_name_of_ours_or_a_file(tmp_path: Path) -> None:
    assert text("chatml") == "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    (tmp_path / "mine.jinja").write_text("mine")
    assert text(str(tmp_path / "mine.jinja")) == "mine"


@pytest.mark.parametrize(
    ("choice", "name", "words"),
    [("lama-3", None, "none of alpaca"), ("auto", "raq", "default, rag, tool_use")],
)
def test_an_unknown_name_says_which_there_are(choice: str, name: str | None, words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        text(choice, name)
