"""The table of parameters against the bodies, OpenAI's own client, docs/api.md, and what is refused.

`python -m tests.http.openai.test_parameters` writes the table of docs/api.md anew.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from runtime.errors import InvalidRequest
from runtime.http.openai import parameters
from runtime.http.openai.completion_request import ChatBody, CompletionBody, Message
from runtime.http.openai.parameters import PARAMETERS, Parameter, refuse, table
from runtime.http.openai.responses.response_request import ResponseBody
from runtime.options.docs import markdown_table

DOC = Path(__file__).parents[3] / "docs" / "api.md"
BEGIN, END = "<!-- parameters: begin -->\n", "<!-- parameters: end -->\n"


def markdown() -> str:
    return markdown_table(("parameter", "route", "of", "here", "note"), table()) + "\n"


def split(text: str) -> tuple[str, str, str]:
    before, _, rest = text.partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before + BEGIN, inside, END + after


def test_the_table_has_every_field_and_no_other() -> None:
    assert PARAMETERS.keys() == {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}


@pytest.mark.parametrize(
    ("official", "body"),
    [
        (chat_params.CompletionCreateParamsBase, ChatBody),
        (text_params.CompletionCreateParamsBase, CompletionBody),
        (response_params.ResponseCreateParamsBase, ResponseBody),
    ],
)
def test_every_parameter_of_openais_client_is_known(official: Any, body: Any) -> None:
    """A newer client may know more than the one that this was written with; each of its parameters needs a
    decision here."""
    known = set(body.__struct_fields__)
    assert official.__annotations__.keys() <= known
    if body is not ResponseBody:
        assert all(PARAMETERS[name].source == "OpenAI" for name in official.__annotations__)


def test_the_document_shows_the_table() -> None:
    assert split(DOC.read_text(encoding="utf-8"))[1] == markdown(), (
        "python -m tests.http.openai.test_parameters"
    )


def test_the_document_names_every_parameter_of_responses() -> None:
    inside = (
        DOC.read_text(encoding="utf-8")
        .partition("<!-- responses: begin -->")[2]
        .partition("<!-- responses: end -->")[0]
    )
    named = {
        name
        for line in inside.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert named == set(ResponseBody.__struct_fields__)


def body_of(kind: Any, **fields: Any) -> Any:
    return (
        ChatBody(messages=[Message("user", "hi")], **fields)
        if kind is ChatBody
        else CompletionBody(prompt="hi", **fields)
    )


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_what_is_refused_says_why_and_what_says_nothing_passes(kind: Any) -> None:
    for name, parameter in parameters._REFUSED[kind].items():
        with pytest.raises(InvalidRequest) as error:
            refuse(body_of(kind, **{name: ["something"]}))
        assert error.value.param == name and parameter.note in error.value.message and parameter.note
        for value in (None, False, "", [], {}, parameter.neutral):
            refuse(body_of(kind, **{name: value}))


def test_refused_parameters_are_explained() -> None:
    assert all(parameter.note for parameter in PARAMETERS.values() if parameter.status == "400")
    assert PARAMETERS["length_penalty"] == Parameter("vLLM", "400", "there is no beam search", neutral=1)


if __name__ == "__main__":
    before, _, after = split(DOC.read_text(encoding="utf-8"))
    DOC.write_text(before + markdown() + after, encoding="utf-8")
