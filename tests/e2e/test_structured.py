"""Structured outputs over HTTP, with the openai client: parsed answers, streams, fields of other APIs,
and refusals that name the field."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.serving import Server, serve

ASK: dict[str, Any] = {
    "model": "pocket",
    "messages": [{"role": "user", "content": "Who is Ada?"}],
    "temperature": 0.3,
    "seed": 4,
    "max_completion_tokens": 250,
}


class Person(BaseModel):
    """What is asked for."""

    kind: Literal["person", "thing"]
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=120)
    tags: list[Literal["a", "b"]] = Field(max_length=2)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--model-path", "pocket", "--constrained-json-disable-any-whitespace") as running:
        yield running


def test_parse(server: Server) -> None:
    answer = server.client.chat.completions.parse(**ASK, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person) and answer.choices[0].finish_reason == "stop"


def test_streams_say_what_whole_answers_say(server: Server) -> None:
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "p", "strict": True, "schema": Person.model_json_schema()},
    }
    whole = server.client.chat.completions.create(**ASK, response_format=schema, n=2)
    texts = ["", ""]
    for chunk in server.client.chat.completions.create(**ASK, response_format=schema, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), Person.model_json_schema())


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"regex": "(yes|no){2}"}, {"yesyes", "yesno", "noyes", "nono"}),
        ({"ebnf": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"guided_choice": ["maybe", "never"]}, {"maybe", "never"}),
        ({"structured_outputs": {"regex": "ab?"}}, {"a", "ab"}),
        ({"json_schema": '{"enum": [1, 2]}'}, {"1", "2"}),
        ({"structural_tag": {"format": {"type": "const_string", "value": "hello"}}}, {"hello"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_apis(server: Server, fields: dict[str, Any], texts: set[str]) -> None:
    assert server.client.chat.completions.create(**ASK, extra_body=fields).choices[0].message.content in texts
    assert (
        server.client.completions.create(model="pocket", prompt="A", max_tokens=50, extra_body=fields)
        .choices[0]
        .text
        in texts
    )
    native = {name: value for name, value in fields.items() if name in ("regex", "ebnf", "json_schema")}
    if native:
        answer = httpx.post(
            f"{server.url}/generate", json={"text": "A", "sampling_params": native}, timeout=60
        ).json()
        assert answer["text"] in texts and answer["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"properties": {"a": {"type": "int"}}}},
                }
            },
            "response_format.json_schema.schema",
            r'response_format.json_schema.schema: at $.properties.a.type: "int" is none of',
        ),
        ({"guided_regex": "(a"}, "guided_regex", "guided_regex: "),
        ({"ebnf": "what?"}, "ebnf", "ebnf: "),
        ({"json_schema": {"not": {"type": "string"}}}, "json_schema", "at $.not"),
        ({"structural_tag": {"format": {"type": "nothing"}}}, "structural_tag", "structural_tag: "),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_bad_rule_is_a_400_that_says_where(
    server: Server, fields: dict[str, Any], param: str, message: str, is_stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client.chat.completions.create(**ASK, extra_body=fields, stream=is_stream)
    assert refused.value.param == param and message in refused.value.message
