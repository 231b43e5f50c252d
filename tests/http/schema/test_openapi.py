"""The OpenAPI document: every route is in it, every example is one, and the page needs nothing from
elsewhere."""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from starlette.routing import Route

from runtime.http.app import _routes, http_app
from runtime.http.auth import Keys
from runtime.http.openai.stored_objects import StoredObjects
from runtime.http.schema.openapi import document
from runtime.http.schema.operations import OPERATIONS, Operation
from runtime.http.settings import DEFAULT, HttpSettings
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio

ROWS = [operation for operations in OPERATIONS.values() for operation in operations]
BODIES = [operation for operation in ROWS if operation.body is not None]
DOCUMENT: dict[str, Any] = msgspec.json.decode(document())


def test_every_route_is_documented_and_nothing_else(tmp_path: Path) -> None:
    stored_objects = StoredObjects(FakeService(), tmp_path, 1000)
    assert stored_objects.storage is not None
    there = set()
    for route in [*_routes(FakeService(), DEFAULT), *stored_objects.routes(DEFAULT)]:
        if isinstance(route, Route):
            there |= {
                (method, re.sub(r"{(\w+)[^}]*}", r"{\1}", route.path))
                for method in (route.methods or set()) - {"HEAD"}
            }
    stored_objects.close()
    documented = [(method, operation.path) for operation in ROWS for method in operation.methods.split()]
    assert len(set(documented)) == len(documented)
    assert set(documented) == there, "each route is made from a row of runtime/http/schema/operations.py"
    assert {
        (method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods
    } == there


@pytest.mark.parametrize("operation", BODIES, ids=lambda operation: operation.path)
def test_examples_are_examples(operation: Operation) -> None:
    """By the type that the route reads, and by the schema that the document tells."""
    assert operation.body is not None
    msgspec.convert(operation.example, operation.body)
    for method in operation.methods.lower().split():
        body = DOCUMENT["paths"][operation.path][method]["requestBody"]["content"]["application/json"]
        validator = jsonschema.Draft202012Validator(body["schema"] | {"components": DOCUMENT["components"]})
        assert body["examples"]["short"]["value"] == operation.example
        validator.validate(operation.example)
        wrongs = [{**operation.example, name: {"wrong": 1}} for name in operation.example]
        assert not any(validator.is_valid(wrong) for wrong in [[], *wrongs])


def test_every_reference_is_there_and_names_are_short() -> None:
    text = document().decode()
    names = DOCUMENT["components"]["schemas"]
    found = set(re.findall(r'"#/components/schemas/([^"]*)"', text))
    assert found and found <= set(names) and "runtime.http" not in text
    assert {"openai.ChatBody", "ollama.ChatBody", "MessagesBody"} <= found
    for name, schema in names.items():
        assert re.fullmatch(r"[\w.-]+", name)
        jsonschema.Draft202012Validator.check_schema(schema)
    ids = [one["operationId"] for methods in DOCUMENT["paths"].values() for one in methods.values()]
    assert len(set(ids)) == len(ids)


async def test_both_are_served_without_a_key_and_under_a_prefix() -> None:
    app = http_app(FakeService(), HttpSettings(keys=Keys(("k",))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        answer, page = await http.get("/openapi.json"), await http.get("/docs")
    assert (
        answer.json() == DOCUMENT
        and page.status_code == 200
        and page.headers["content-type"].startswith("text/html")
    )
    assert DOCUMENT["openapi"].startswith("3.1") and DOCUMENT["servers"] == [{"url": "."}]
    links = re.findall(r"""(?:src|href|fetch\()=?["'(]*([^"')>]+)""", page.text)
    assert "openapi.json" in links and not any(link.startswith(("http", "//", "/")) for link in links), links
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_levels_are_documented() -> None:
    levels = {path: next(iter(methods.values()))["x-level"] for path, methods in DOCUMENT["paths"].items()}
    assert (levels["/health"], levels["/v1/messages"], levels["/flush_cache"]) == ("open", "user", "admin")


def test_every_field_of_a_body_is_described() -> None:
    """In words for people, which /docs shows next to the type."""
    whole = msgspec.json.decode(document())
    bare = []
    for path, methods in whole["paths"].items():
        for content in [
            c for one in methods.values() for c in one.get("requestBody", {}).get("content", {}).values()
        ]:
            name = content["schema"].get("$ref", "").rpartition("/")[2]
            schema = whole["components"]["schemas"].get(name, content["schema"])
            fields = schema.get("properties", {}).items()
            bare += [f"{path}: {name}.{field}" for field, about in fields if not about.get("description")]
    assert bare == [], "runtime/http/schema/fields.py has the descriptions"


def test_every_operation_has_samples_of_its_example() -> None:
    """For curl and for Python; a form for curl alone. Python's compile, and both have the whole body."""
    whole = msgspec.json.decode(document())
    for path, methods in whole["paths"].items():
        for method, operation in methods.items():
            found = {sample["label"]: sample["source"] for sample in operation["x-codeSamples"]}
            contents = operation.get("requestBody", {}).get("content", {})
            assert f"http://127.0.0.1:30000{path}" in found["curl"].replace("'", "")
            if "multipart/form-data" in contents:
                assert re.search(r"-F (file|data)=@", found["curl"]) and list(found) == ["curl"]
                continue
            compile(found["Python"], path, "exec")
            assert f'method="{method.upper()}"' in found["Python"]
            if contents:
                body = contents["application/json"]["examples"]["short"]["value"]
                written = found["Python"].partition("body = ")[2].partition("request = ")[0]
                assert ast.literal_eval(written) == body
                sent = shlex.split(found["curl"].replace("\\\n", " "))
                assert msgspec.json.decode(sent[sent.index("-d") + 1]) == body
