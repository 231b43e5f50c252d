"""The OpenAPI document, made from the operations and their types, and a page that shows it."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime import __version__
from runtime.http.auth import level_of
from runtime.http.errors import AnthropicError, OllamaError, OpenAIError
from runtime.http.operation import Operation
from runtime.http.schema.fields import description
from runtime.http.schema.operations import DOCUMENT, OPERATIONS, PAGE
from runtime.http.schema.samples import samples

SCHEMAS = "#/components/schemas/"
Schema = dict[str, object]
Schemas = dict[object, Schema]  # by type
HTML = Path(__file__).with_name("docs.html")
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:"
    )
}
MEDIA = {
    "json": "application/json",
    "sse": "text/event-stream",
    "ndjson": "application/x-ndjson",
    "text": "text/plain",
    "binary": "application/octet-stream",
    "html": "text/html",
    "any": "*/*",
}
# Types of refusals by tag; other routes refuse as OpenAI's do.
ERRORS: dict[str, type[Struct]] = {"OpenAI": OpenAIError, "Anthropic": AnthropicError, "Ollama": OllamaError}
# names that msgspec gives to types of the same short name
_LONG = re.compile(rb"runtime\.http\.(\w+)(?:\.\w+)*\.(\w+)")


def routes() -> list[Route]:
    """The routes of the document and of the page."""

    async def show(_: Request) -> Response:
        return Response(document(), media_type="application/json")

    async def read(_: Request) -> Response:
        return Response(HTML.read_bytes(), media_type="text/html", headers=PAGE_HEADERS)

    return [DOCUMENT.route(show), PAGE.route(read)]


@cache
def document() -> bytes:
    """The document as JSON."""
    rows = [(tag, operation) for tag, operations in OPERATIONS.items() for operation in operations]
    schemas, components = _schemas(rows)
    paths: dict[str, dict[str, object]] = {}
    for tag, operation in rows:
        for method in operation.methods.split():
            paths.setdefault(operation.path, {})[method.lower()] = _operation(tag, method, operation, schemas)
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "runtime", "version": __version__, "description": "The HTTP APIs of this server."},
        "servers": [{"url": "."}],
        "tags": [{"name": tag} for tag in OPERATIONS],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return _LONG.sub(rb"\1.\2", msgspec.json.encode(whole))


def _schemas(rows: list[tuple[str, Operation]]) -> tuple[Schemas, Schema]:
    """The schemas of all types by type, and the components that they refer to."""
    kinds: list[object] = [operation.body for _, operation in rows if operation.body is not None]
    for _, operation in rows:
        kinds += operation.answers + operation.events
    kinds = list(dict.fromkeys([*kinds, *ERRORS.values()]))
    refs, components = msgspec.json.schema_components(kinds, ref_template=SCHEMAS + "{name}")
    for _, operation in rows:
        if operation.body is not None:
            _describe(components, str(refs[kinds.index(operation.body)]["$ref"]).removeprefix(SCHEMAS))
    return dict(zip(kinds, refs, strict=True)), components


def _describe(components: Mapping[str, Schema], name: str) -> None:
    """Gives the fields of a body their descriptions."""
    properties = components[name].get("properties", {})
    assert isinstance(properties, dict)
    for field, schema in properties.items():
        if text := description(_LONG.sub(rb"\1.\2", name.encode()).decode(), field):
            schema.setdefault("description", text)


def _one_of(kinds: tuple[object, ...], schemas: Schemas) -> Schema:
    return schemas[kinds[0]] if len(kinds) == 1 else {"anyOf": [schemas[kind] for kind in kinds]}


def _contents(operation: Operation, schemas: Schemas) -> dict[str, object]:
    """The possible answers by media type."""
    if not operation.answers:
        return {} if operation.media == "json" else {MEDIA[operation.media]: {}}
    contents: dict[str, object] = {MEDIA["json"]: {"schema": _one_of(operation.answers, schemas)}}
    if operation.events:  # OpenAPI 3.1 cannot describe the events of a stream
        contents[MEDIA["sse" if operation.media == "json" else operation.media]] = {
            "x-event": _one_of(operation.events, schemas)
        }
    return contents


def _operation(tag: str, method: str, operation: Operation, schemas: Schemas) -> dict[str, object]:
    level = level_of(operation.path)
    body = schemas[operation.body] if operation.body is not None else None
    refusal = schemas[ERRORS[tag if tag in ERRORS else "OpenAI"]]
    words: dict[str, object] = {
        "tags": [tag],
        "summary": operation.summary,
        "operationId": f"{method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', operation.path)}",
        "responses": {
            "200": {"description": "The answer", "content": _contents(operation, schemas)},
            "default": {"description": "Refused", "content": {MEDIA["json"]: {"schema": refusal}}},
        },
        # a user's or the administrator's key, where the server has keys
        "security": [] if level == "open" else [{"bearer": []}, {"key": []}, {}],
        "x-level": level,
        "x-codeSamples": samples(
            method, operation.path, None if body is None else operation.example, operation.form
        ),
    }
    if parameters := _parameters(operation):
        words["parameters"] = parameters
    if body is not None:
        content = {"schema": body, "examples": {"short": {"value": operation.example}}}
        # an empty body means {}, where nothing is required; a GET may have a body, too
        words["requestBody"] = {
            "required": bool(operation.example) and method != "GET",
            "content": {MEDIA["json"]: content},
        }
    elif operation.form:
        fields = {
            name: {"type": "string", "description": description("", name)}
            for name in (*operation.form, *operation.form_options)
        }
        for name, value in operation.form.items():
            if value.startswith("@"):  # the name of a file, for curl
                fields[name]["format"] = "binary"
        schema = {"type": "object", "properties": fields, "required": list(operation.form)}
        words["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return words


def _parameters(operation: Operation) -> list[dict[str, object]]:
    text = {"type": "string", "minLength": 1}
    return [
        *[
            {"name": name, "in": "path", "required": True, "schema": text}
            for name in re.findall(r"{(\w+)}", operation.path)
        ],
        *[{"name": name, "in": "query", "required": False, "schema": text} for name in operation.query],
    ]
