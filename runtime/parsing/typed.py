"""Values that a format writes as bare text, and that the schema of the tool gives a type."""

import json
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema]  # the schema of the parameters, by name of the function

_NAMES = {"True": True, "False": False, "None": None}  # models write Python where JSON is meant
_TYPES: dict[type, tuple[str, ...]] = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), dict: ("object",),
                                       list: ("array",), type(None): ("null",), str: ()}
MAX_DEPTH = 8  # of anyOf in anyOf


def types_of(tools: Tools, function: str, parameter: str) -> frozenset[str]:
    """The types that a parameter may have; none when its schema does not say."""
    properties = tools.get(function, {}).get("properties")
    return _types(properties.get(parameter) if isinstance(properties, Mapping) else None, MAX_DEPTH)


def _types(schema: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else {name for name in kind if isinstance(name, str)} if isinstance(kind, list) else set()
    if not found and isinstance(values := schema.get("enum"), list) and all(isinstance(value, str) for value in values):
        found = {"string"}
    for word in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(word) or () if isinstance(schema.get(word), list) else ():
            found |= _types(choice, depth - 1)
    return frozenset(found)


def value_of(text: str, types: frozenset[str]) -> Any:
    """`text` as one of the types: what is JSON of a type that is allowed is that, the rest is a string.

    Where the schema leaves the type open, all JSON but strings counts. Where it does not allow a string and the text is nothing
    else, it is a string all the same: the tool shall see what the model said.
    """
    if types == {"string"}:
        return text
    bare = text.strip()
    try:
        value = _NAMES[bare] if bare in _NAMES else json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return text if "string" in types or not types else value
    return value if not types or not types.isdisjoint(_TYPES[type(value)]) or "string" not in types else text


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
