"""Values that a format writes as bare text; the schema of the tool's parameters gives them a type."""

import ast
import json
import warnings
from collections.abc import Mapping

from runtime.json_value import JsonValue

Schema = Mapping[str, JsonValue]
Tools = Mapping[str, Schema]  # the schema of the parameters, by name of the function

_NAMES = {"True": True, "False": False, "None": None}  # models write Python where JSON is meant
_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
    str: ("string",),
}
_WORDS = {
    "str": "string",
    "text": "string",
    "enum": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}  # what some write for the types of JSON Schema
_JOINED = ("anyOf", "oneOf", "allOf")
MAX_DEPTH = 8  # of anyOf in anyOf, and of $ref to $ref
MAX_PYTHON = 2**14  # characters of a value that is read as Python's


def parameters_of(schema: object, root: Schema | None, depth: int = MAX_DEPTH) -> dict[str, list[JsonValue]]:
    """For each property, what a schema and the schemas it is composed of say of it."""
    schema = _resolved(schema, root)
    found: dict[str, list[JsonValue]] = {}
    if isinstance(properties := schema.get("properties"), Mapping):
        found = {name: [value] for name, value in properties.items()}
    for word in _JOINED if depth else ():
        for choice in _list(schema.get(word)):
            for name, values in parameters_of(choice, root, depth - 1).items():
                found.setdefault(name, []).extend(values)
    return found


def child_of(schema: object, name: str, root: Schema | None) -> JsonValue:
    """The schema of a property; None: there is none."""
    schema = _resolved(schema, root)
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    if values := parameters_of(schema, root).get(name):
        return {"anyOf": values}
    others = schema.get("additionalProperties")
    return others if isinstance(others, Mapping) else None


def items_of(schema: object, at: int, root: Schema | None) -> JsonValue:
    """The schema of a list's item at this index."""
    schema = _resolved(schema, root)
    first = schema.get("prefixItems")
    return first[at] if isinstance(first, list) and at < len(first) else schema.get("items")


def _resolved(schema: object, root: Schema | None) -> Schema:
    """The schema behind $ref, which must point into the same schema."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(ref := schema.get("$ref"), str):
            break
        schema = root
        for key in ref.removeprefix("#/").split("/"):
            schema = (
                schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
            )
    return schema if isinstance(schema, Mapping) else {}


def kinds_of(schema: object, root: Schema | None = None) -> frozenset[str]:
    """The types that a value may have; none where its schema does not say. `root`: the schema that $ref
    points into."""
    return _kinds(schema, root, MAX_DEPTH)


def _kinds(schema: object, root: Schema | None, depth: int) -> frozenset[str]:
    schema = _resolved(schema, root)
    if not schema or not depth:
        return frozenset()
    kind = schema.get("type")
    found = (
        {kind}
        if isinstance(kind, str)
        else {name for name in kind if isinstance(name, str)}
        if isinstance(kind, list)
        else set()
    )
    if not found and isinstance(
        values := schema.get("enum", [schema["const"]] if "const" in schema else None), list
    ):
        found = {name for value in values for name in _TYPES.get(type(value), ())}
    found = {_WORDS.get(name, name) for name in found}
    for word in _JOINED:
        for choice in _list(schema.get(word)):
            found |= _kinds(choice, root, depth - 1)
    return frozenset(found)


def _list(value: object) -> list[JsonValue]:
    return value if isinstance(value, list) else []


def value_of(text: str, types: frozenset[str]) -> JsonValue:
    """`text` as a value of one of the types: JSON of an allowed type is that value, anything else is a
    string.

    Where the schema leaves the type open, all JSON but strings counts. Where it does not allow a string and
    the text is nothing else, it is a string all the same: the tool should see what the model wrote.
    """
    if types == {"string"}:
        return text
    bare = text.strip()
    try:
        value = _NAMES[bare] if bare in _NAMES else _json(bare)
    except (ValueError, RecursionError):
        if "string" in types:
            return text
        value = _mended(bare, text)
        return value_of(value, types) if isinstance(value, str) and value != text else value
    if isinstance(value, str):
        return text if "string" in types or not types else value_of(value, types) if value != text else value
    if types <= {"boolean", "null"} and types and type(value) is int and value in (0, 1):
        return bool(value)
    return value if not types or not types.isdisjoint(_TYPES[type(value)]) or "string" not in types else text


def _json(text: str) -> JsonValue:
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _mended(bare: str, text: str) -> JsonValue:
    """A value that is JSON without its escapes, or a list or an object in Python's notation; `text` if it is
    neither."""
    if '\\"' in bare:
        try:
            return _json(json.loads(f'"{bare}"', strict=False))
        except (ValueError, RecursionError, TypeError):
            pass
    if len(bare) > MAX_PYTHON or bare[:1] not in ("{", "["):
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in a model's strings
            value = ast.literal_eval(bare)
        return json.loads(json.dumps(value, allow_nan=False)) if isinstance(value, dict | list) else text
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:
        raise ValueError(text)
    return number


def is_json(text: str) -> bool:
    """Whether the text is one complete JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def as_json(value: object) -> str:
    """The value as JSON text, with characters beyond ASCII as they are."""
    text = json.dumps(value, ensure_ascii=False)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a character, which only an escape can say
            return json.dumps(value)
    return text
