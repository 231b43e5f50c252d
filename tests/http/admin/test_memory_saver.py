"""What the ranks hold, over HTTP, in SGLang's words."""

from typing import Any

import httpx
import pytest

from runtime.errors import Busy
from runtime.http.app import http_app
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio


def client(service: FakeService) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(http_app(service)), base_url="http://test")


async def test_release_and_resume() -> None:
    service = FakeService()
    async with client(service) as http:
        everything = await http.post("/release_memory_occupation", json={})
        assert everything.status_code == 200 and everything.json()["released"] == [
            "kv_cache",
            "weights",
            "cuda_graph",
        ]
        some = await http.post("/resume_memory_occupation", json={"tags": ["weights", "cuda_graph"]})
        assert some.json() == {"success": True, "message": "given back: kv_cache", "released": ["kv_cache"]}
        rest = await http.post("/resume_memory_occupation")
        assert rest.json() == {"success": True, "message": "given back: nothing", "released": []}
        assert service.controls.calls == [
            ("release", None),
            ("take", ["weights", "cuda_graph"]),
            ("take", None),
        ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/release_memory_occupation", {"tags": ["heap"]}, "tags[0]"),
        ("/resume_memory_occupation", {"tag": ["weights"]}, "tag"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "x", "is_async": True}, "is_async"),
        ("/update_weights_from_disk", {"model_path": "x", "manifest": {}}, "manifest"),
    ],
)
async def test_what_is_not_understood_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    service = FakeService()
    async with client(service) as http:
        answer = await http.post(path, json=body)
    assert (
        answer.status_code == 400
        and answer.json()["error"]["param"].startswith(param.rstrip("[0]"))
        and not service.controls.calls
    )


async def test_busy_is_400_and_names_the_remedy() -> None:
    service = FakeService()
    service.controls.busy = Busy("pause first")
    async with client(service) as http:
        answer = await http.post("/release_memory_occupation", json={})
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "pause first"


async def test_other_weights() -> None:
    service = FakeService()
    async with client(service) as http:
        answer = await http.post(
            "/update_weights_from_disk",
            json={
                "model_path": "/models/x",
                "weight_version": "7",
                "abort_all_requests": True,
                "flush_cache": False,
                "token_step": 3,
            },
        )
    assert (
        answer.status_code == 200
        and answer.json()["success"] is True
        and answer.json()["num_paused_requests"] == 0
    )
    assert service.controls.calls == [("abort", ""), ("update_weights", "/models/x", None, "7", False)]


async def test_probes_know() -> None:
    service = FakeService(state="released")
    async with client(service) as http:
        assert (await http.get("/health")).status_code == 200, "it is what somebody wished"
        answer = await http.get("/health_generate")
    assert answer.status_code == 503 and "/resume_memory_occupation" in answer.json()["error"]["message"]
