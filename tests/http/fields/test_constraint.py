"""From the fields of all APIs to one rule, and refusals in the client's words."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.http.fields.constraint import constraint_of
from runtime.messages.constraint import Choice, Ebnf, JsonObject, JsonSchema, Regex, Rule, StructuralTag

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
OLD = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
NEW = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}],
    },
}


def read(prefix: str = "", **fields: Any) -> tuple[Rule | None, dict[str, str]]:
    return constraint_of(SimpleNamespace(**fields), prefix)


@pytest.mark.parametrize(
    ("fields", "rule", "where"),
    [
        ({"response_format": {"type": "json_object"}}, JsonObject(), "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            JsonSchema(TEXT),
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},  # llama.cpp's
            JsonSchema(TEXT),
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},  # TGI's, of huggingface_hub
            JsonSchema(TEXT),
            "response_format.value",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": None, "schema": None}},
            JsonObject(),
            "response_format",
        ),
        ({"response_format": {"type": "json", "value": SCHEMA}}, JsonSchema(TEXT), "response_format.value"),
        ({"response_format": {"type": "regex", "value": "a+"}}, Regex("a+"), "response_format.value"),
        ({"response_format": TAG}, StructuralTag(json.dumps(TAG, separators=(",", ":"))), "response_format"),
        ({"response_format": OLD}, StructuralTag(json.dumps(NEW, separators=(",", ":"))), "response_format"),
        (
            {"structural_tag": json.dumps(TAG)},
            StructuralTag(json.dumps(TAG, separators=(",", ":"))),
            "structural_tag",
        ),
        ({"json_schema": TEXT}, JsonSchema(TEXT), "json_schema"),
        ({"json_schema": "$$ANY$$"}, JsonObject(), "json_schema"),
        ({"regex": "a+"}, Regex("a+"), "regex"),
        ({"ebnf": 'root ::= "a"'}, Ebnf('root ::= "a"'), "ebnf"),
        ({"guided_json": SCHEMA}, JsonSchema(TEXT), "guided_json"),
        ({"guided_regex": "a+"}, Regex("a+"), "guided_regex"),
        ({"guided_choice": ["a", "b"]}, Choice(("a", "b")), "guided_choice"),
        ({"guided_grammar": "root ::= x"}, Ebnf("root ::= x"), "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(TEXT), "structured_outputs.json"),
        (
            {"structured_outputs": {"choice": ["a"], "regex": None}},
            Choice(("a",)),
            "structured_outputs.choice",
        ),
        ({"structured_outputs": {"json_object": True}}, JsonObject(), "structured_outputs.json_object"),
        ({"response_format": {"type": "text"}, "regex": "a"}, Regex("a"), "regex"),
    ],
)
def test_every_field_makes_its_rule(fields: dict[str, Any], rule: Rule, where: str) -> None:
    assert read(**fields) == (rule, {"constraint": where})
    assert read("sampling_params.", **fields) == (rule, {"constraint": f"sampling_params.{where}"})


def test_without_a_field_there_is_no_rule() -> None:
    assert read() == read(response_format={"type": "text"}, regex="", ebnf=None) == (None, {})


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"regex": "a", "ebnf": "root ::= x"}, "ebnf", "regex and ebnf both say"),
        (
            {"response_format": {"type": "json_object"}, "guided_json": SCHEMA},
            "guided_json",
            "response_format and guided_json",
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex", "both say"),
        ({"structured_outputs": {"xml": SCHEMA}}, "structured_outputs.xml", "known are"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
            "object",
        ),
        (
            {"response_format": OLD | {"structures": [{"begin": 1}]}},
            "response_format.structures[0].begin",
            "str",
        ),
        ({"guided_choice": []}, "guided_choice", "guided_choice: "),
        ({"regex": "a" * 300_000}, "regex", "262144"),
        ({"structural_tag": "{"}, "structural_tag", "not JSON"),
        ({"response_format": {"type": "json", "value": 3}}, "response_format.value", "must be an object"),
        ({"response_format": {"type": "json"}}, "response_format.value", "is missing"),
        ({"response_format": {"type": "regex", "value": SCHEMA}}, "response_format.value", "str"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}},
            "response_format.value",
            "one of them",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
            "no part of the type json_object",
        ),
        (
            {"response_format": {"type": "text", "schema": SCHEMA}},
            "response_format.schema",
            "no part of the type text",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        read(**fields)
    assert refused.value.param == param
