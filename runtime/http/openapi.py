"""The OpenAPI document, made from the routes in words (operations.py) and the types of their bodies; and a page to read it."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime import __version__
from runtime.http.doors import level_of
from runtime.http.operations import OPERATIONS, Operation

SCHEMAS = "#/components/schemas/"
PAGE = Path(__file__).with_name("docs.html")
PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"}
MEDIA = {"json": "application/json", "sse": "text/event-stream", "ndjson": "application/x-ndjson", "text": "text/plain",
         "binary": "application/octet-stream", "html": "text/html"}
_LONG = re.compile(rb"runtime\.http\.(\w+)(?:\.\w+)*\.(\w+)")  # what msgspec calls types whose short names are taken
ERRORS = {"OpenAI": {"error": {"message": "", "type": "", "param": None, "code": ""}}, "Ollama": {"error": ""},
          "Anthropic": {"type": "error", "error": {"type": "", "message": ""}}}  # as each dialect has them; the rest as OpenAI


def routes() -> list[Route]:
    async def show(_: Request) -> Response:
        return Response(document(), media_type="application/json")

    async def read(_: Request) -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html", headers=PAGE_HEADERS)

    return [Route("/openapi.json", show), Route("/docs", read)]


@cache
def document() -> bytes:
    """As JSON."""
    rows = [(tag, operation) for tag, operations in OPERATIONS.items() for operation in operations]
    bodies = list(dict.fromkeys(operation.body for _, operation in rows if operation.body is not None))
    refs, components = msgspec.json.schema_components(bodies, ref_template=SCHEMAS + "{name}")
    schemas = dict(zip(bodies, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for tag, operation in rows:
        for method in operation.methods.split():
            body = schemas[operation.body] if operation.body is not None else None
            paths.setdefault(operation.path, {})[method.lower()] = _operation(tag, method, operation, body)
    for tag, error in ERRORS.items():
        components[f"{tag}Error"] = _shape(error)
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "runtime", "version": __version__, "description": "The HTTP API of this server, in all its dialects."},
        "servers": [{"url": "."}],
        "tags": [{"name": tag} for tag in OPERATIONS],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}},
    }
    return _LONG.sub(rb"\1.\2", msgspec.json.encode(whole))


def _operation(tag: str, method: str, operation: Operation, body: dict[str, Any] | None) -> dict[str, Any]:
    level = level_of(operation.path)
    kinds = ["json", operation.answer] if operation.answer in ("sse", "ndjson") else [operation.answer]
    form = f"{tag if tag in ERRORS else 'OpenAI'}Error"
    told: dict[str, Any] = {
        "tags": [tag], "summary": operation.summary, "operationId": f"{method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', operation.path)}",
        "responses": {
            "200": {"description": "The answer", "content": {MEDIA[kind]: {"schema": {}} for kind in kinds}},
            "default": {"description": "Refused", "content": {MEDIA["json"]: {"schema": {"$ref": SCHEMAS + form}}}},
        },
        # one of a user's or the administrator's keys, where the server has any
        "security": [] if level == "open" else [{"bearer": []}, {"key": []}, {}],
        "x-level": level,
    }
    if parameters := _parameters(operation):
        told["parameters"] = parameters
    if body is not None:
        content = {"schema": body, "examples": {"short": {"value": operation.example}}}
        # an empty body is as good as {}, where nothing is required; a GET may have one, too
        told["requestBody"] = {"required": bool(operation.example) and method != "GET", "content": {MEDIA["json"]: content}}
    elif operation.form:
        fields = {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}}
        schema = {"type": "object", "properties": fields, "required": list(fields)}
        told["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return told


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    text = {"type": "string", "minLength": 1}
    return [*[{"name": name, "in": "path", "required": True, "schema": text} for name in re.findall(r"{(\w+)}", operation.path)],
            *[{"name": name, "in": "query", "required": False, "schema": text} for name in operation.query]]


def _shape(example: Any) -> dict[str, Any]:
    """The schema of things that look like `example`."""
    if isinstance(example, dict):
        return {"type": "object", "properties": {name: _shape(value) for name, value in example.items()}, "required": list(example)}
    return {"type": "string"} if isinstance(example, str) else {"type": ["string", "null"]}
