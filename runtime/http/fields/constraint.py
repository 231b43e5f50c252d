"""The fields of all APIs that constrain the form of an answer. At most one of them may be given."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from runtime.errors import InvalidRequest
from runtime.http.errors import convert
from runtime.json_value import Fields
from runtime.messages.constraint import Rule

Raw = Fields  # a Rule with its tag, before its limits are checked


class JsonSchemaFormat(Struct):
    """`response_format.json_schema`. Answers follow the schema whether `strict` is set or not."""

    schema: Fields
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


def constraint_of(body: object, prefix: str = "") -> tuple[Rule | None, dict[str, str]]:
    """The rule that a request's fields make, and `{"constraint": field}`: the client's name of it, for
    refusals.

    `prefix` stands before the fields' names there. Raises InvalidRequest, also for two rules at once.
    """
    found: list[tuple[str, Raw]] = []
    for name, read in _FIELDS.items():
        if (value := getattr(body, name, None)) not in (None, "", {}):
            found += read(prefix + name, value)
    if not found:
        return None, {}
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0][0]} and {found[1][0]} both say what the answer looks like; give one of them",
            param=found[1][0],
        )
    where, raw = found[0]
    try:
        rule: Rule = convert(raw, Rule, {})  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error.message}", param=where) from None
    return rule, {"constraint": where}


def _schema(where: str, value: object) -> list[tuple[str, Raw]]:
    if value == "$$ANY$$":  # SGLang's word for any object
        return [(where, {"type": "json_object"})]
    return [(where, {"type": "json_schema", "schema": _text(where, value, bool)})]


def _plain(kind: str, field: str) -> Callable[[str, object], list[tuple[str, Raw]]]:
    def read(where: str, value: object) -> list[tuple[str, Raw]]:
        return [(where, {"type": kind, field: value})]

    return read


def _tag(where: str, value: object) -> list[tuple[str, Raw]]:
    tag = value
    if isinstance(value, str):
        try:
            tag = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{where} is not JSON: {error}", param=where) from None
    if not isinstance(tag, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    if "structures" in tag:
        tag = _triggered(where, tag)
    return [
        (
            where,
            {"type": "structural_tag", "tag": msgspec.json.encode({"type": "structural_tag"} | tag).decode()},
        )
    ]


class _Structure(Struct, forbid_unknown_fields=True):
    """A tagged part in the older form."""

    begin: str
    end: str
    schema: Fields | bool


class _Structures(Struct):
    """The older form of structural tags, which SGLang took first."""

    structures: list[_Structure]
    triggers: list[str]


def _triggered(where: str, tag: Fields) -> Fields:
    old = convert(tag, _Structures, {name: f"{where}.{name}" for name in ("structures", "triggers")})
    tags = [
        {"begin": one.begin, "content": {"type": "json_schema", "json_schema": one.schema}, "end": one.end}
        for one in old.structures
    ]
    return {"format": {"type": "triggered_tags", "triggers": old.triggers, "tags": tags}}


# a type of response_format -> its fields; `schema` is llama.cpp's, `value` that of TGI and huggingface_hub
_FORMATS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema", "value"),
    "json": ("schema", "value"),
    "regex": ("value",),
    "json_schema": ("json_schema",),
}


def _response_format(where: str, value: Fields) -> list[tuple[str, Raw]]:
    kind = value.get("type")
    if kind == "structural_tag":
        return _tag(where, value)
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise InvalidRequest(
            f"{where}.type must be {', '.join(_FORMATS)} or structural_tag", param=f"{where}.type"
        )
    given = [name for name, one in value.items() if name != "type" and one is not None]
    for name in given:
        if name not in _FORMATS[kind]:
            raise InvalidRequest(f"{where}.{name} is no part of the type {kind}", param=f"{where}.{name}")
    if kind == "text":
        return []
    if not given:
        if kind == "json_object":
            return [(where, {"type": "json_object"})]
        missing = f"{where}.{_FORMATS[kind][-1]}"
        raise InvalidRequest(f"{missing} is missing", param=missing)
    if len(given) > 1:
        raise InvalidRequest(
            f"{where} has {given[0]} and {given[1]}; give one of them", param=f"{where}.{given[1]}"
        )
    (name,) = given
    if kind == "json_schema":
        return _json_schema(f"{where}.{name}", value[name])
    if kind == "regex":
        return [(f"{where}.{name}", {"type": "regex", "pattern": value[name]})]
    return _schema(f"{where}.{name}", value[name])


def _json_schema(where: str, value: object) -> list[tuple[str, Raw]]:
    try:
        given = convert(value, JsonSchemaFormat, {})
    except InvalidRequest as error:
        param = f"{where}.{error.param}" if error.param else where
        raise InvalidRequest(f"{where}: {error.message}", param=param) from None
    return _schema(f"{where}.schema", given.schema)


def _structured_outputs(where: str, value: Fields) -> list[tuple[str, Raw]]:
    """vLLM's object: one of its fields, which are those of guided_*."""
    found: list[tuple[str, Raw]] = []
    for name, one in value.items():
        if one in (None, False):
            continue
        if name == "json_object":
            found.append((f"{where}.{name}", {"type": "json_object"}))
        elif name in _STRUCTURED:
            found += _STRUCTURED[name](f"{where}.{name}", one)
        else:
            raise InvalidRequest(
                f"{where}.{name} is not a known field; known are json_object, {', '.join(_STRUCTURED)}",
                param=f"{where}.{name}",
            )
    return found


def _text(where: str, value: object, *kinds: type) -> str:
    """JSON as text, given as such or as the thing itself."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (dict, *kinds)):
        raise InvalidRequest(f"{where} must be an object, or its JSON text", param=where)
    return msgspec.json.encode(value).decode()


_STRUCTURED: Mapping[str, Callable[[str, Any], list[tuple[str, Raw]]]] = {
    "json": _schema,
    "regex": _plain("regex", "pattern"),
    "choice": _plain("choice", "choices"),
    "grammar": _plain("ebnf", "grammar"),
    "structural_tag": _tag,
}
# what a field holds is of the type of the body's field: a text, or an object
_FIELDS: Mapping[str, Callable[[str, Any], list[tuple[str, Raw]]]] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "regex": _plain("regex", "pattern"),
    "ebnf": _plain("ebnf", "grammar"),
    "structural_tag": _tag,
    **{f"guided_{name}": read for name, read in _STRUCTURED.items() if name != "structural_tag"},
    "structured_outputs": _structured_outputs,
}
