"""Values as bare text, with types from schemas."""

from typing import Any

import pytest

from runtime.parsing.schema_types import kinds_of, value_of


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["integer", "string"]}, "auto", "auto"),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": ["string", "object"]}, "7", "7"),
        ({"type": ["string", "null"]}, "null", None),
        ({"enum": ["ok", None]}, "null", None),
        ({"enum": ["7", None]}, "7", "7"),
        ({"const": 7}, "7", 7),
        ({"const": "null"}, "null", "null"),
        ({"anyOf": [{"type": "null"}, {"type": "array"}]}, "[1, 2]", [1, 2]),
        ({}, "123_456", "123_456"),
        ({}, '{"a": false}', {"a": False}),
        ({"type": "string"}, "1e2", "1e2"),
        ({"type": "number"}, "1.25e2", 125.0),
        ({"type": "number"}, "123abc", "123abc"),
        ({"type": "number"}, r"\"123\"", 123),
        ({"type": "integer"}, "", ""),
        ({"type": "array"}, "['it\\'s', (1, 2)]", ["it's", [1, 2]]),
        ({"type": "array"}, "[__import__('os')]", "[__import__('os')]"),
        ({"type": "object"}, "{1: {2}}", "{1: {2}}"),
        ({"$ref": "#/$defs/x"}, "5", 5),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "-1e400", "-1e400"),
        ({"type": "boolean"}, "0", False),
        ({"type": "str"}, "5", "5"),
        ({"type": "float"}, "3.5", 3.5),
    ],
)
def test_values_by_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    found = value_of(text, kinds_of(schema, {"$defs": {"x": {"$ref": "#/$defs/x"}}}))
    assert found == value and type(found) is type(value)
