"""Each route that the openai, anthropic and ollama clients know is served, or its refusal says what there is
in its place."""

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import httpx
import ollama
import pytest

from runtime.http.app import http_app
from runtime.http.openai.stored_objects import StoredObjects
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio

CALL = re.compile(r'self\._(get|post|delete|get_api_list|put|patch)\(\s*(?:path_template\(\s*)?"([^"]+)"')
OLLAMA = re.compile(r"'(GET|POST|DELETE|HEAD)',\s*f?'(/[^']+)'")


def known_routes() -> set[tuple[str, str]]:
    """Methods and paths in the sources of the clients, with x for each parameter."""
    found = set()
    for name, root in (("openai", "/v1"), ("anthropic", "")):
        package = importlib.import_module(f"{name}.resources")
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            source = inspect.getsource(importlib.import_module(module.name))
            found |= {
                ("GET" if method == "get_api_list" else method.upper(), root + path)
                for method, path in CALL.findall(source)
            }
    source = inspect.getsource(sys.modules[ollama.Client.__module__])
    found |= set(OLLAMA.findall(source))
    return {(method, re.sub(r"{[^}]*}", "x", path.partition("?")[0])) for method, path in found}


async def test_the_clients_routes_are_served_or_say_what_is(tmp_path: Path) -> None:
    routes = known_routes()
    paths = {path for _, path in routes}
    assert {
        "/v1/conversations/x/items",
        "/v1/uploads/x/parts",
        "/v1/messages/batches/x/cancel",
        "/v1/assistants",
        "/api/tags",
    } <= paths
    stored = StoredObjects(FakeService(), tmp_path, 2**20)
    app = http_app(FakeService(), stored_objects=stored)
    absent, silent = 0, []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        for method, path in sorted(routes):
            answer = await http.request(method, path)
            if answer.status_code in (404, 405) and re.search("there is no route|does not take", answer.text):
                absent += 1
                if ";" not in answer.text:
                    silent.append((method, path, answer.text))
    stored.close()
    assert absent > 100 and silent == []


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("POST", "/v1/assistants", "/v1/conversations"),
        ("GET", "/v1/chat/completions", "/v1/responses"),
        ("GET", "/v1/chat/completions/chatcmpl-1", "/v1/responses"),
        ("POST", "/v1/audio/speech", "/v1/audio/transcriptions"),
        ("POST", "/v1/vector_stores/v/search", "/v1/rerank"),
        ("POST", "/v1/moderations", "/v1/classify"),
        ("POST", "/chat/completions", "/v1/chat/completions"),
    ],
)
async def test_what_there_is_instead(method: str, path: str, remedy: str) -> None:
    transport = httpx.ASGITransport(http_app(FakeService()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.request(method, path)
    assert answer.status_code in (404, 405)
    before, _, after = answer.json()["error"]["message"].partition(";")
    assert path in before and remedy in after
