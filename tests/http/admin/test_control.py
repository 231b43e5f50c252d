"""Routes for operators: what they tell the service, and how refusals look."""

from typing import Any

import httpx
import pytest

from runtime.errors import Busy, Unavailable
from runtime.http.app import http_app
from runtime.messages.ranks import Profile
from tests.http.fake import FakeControls, FakeService

pytestmark = pytest.mark.anyio


async def call(service: FakeService, path: str, method: str = "POST", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
    ) as http:
        return await http.request(method, path, json=body) if body else await http.request(method, path)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/pause_generation", {}, ("pause", "abort")),
        ("/pause_generation", {"mode": "in_place"}, ("pause", "in_place")),
        ("/continue_generation", {}, "resume"),
        ("/flush_cache", {}, "flush"),
        ("/clear_hicache_storage_backend", {}, "clear"),
        ("/disaggregation_mode", {"mode": "prefill"}, ("role", "prefill")),
        ("/abort_request", {"rid": "batch-7"}, ("abort", "batch-7")),
        ("/abort_request", {"abort_all": True}, ("abort", "")),
        (
            "/open_session",
            {"capacity_of_str_len": 9, "session_id": "s", "timeout": 5, "streaming": True},
            ("open", 9, "s", 5.0, True),
        ),
        ("/start_profile", {"output_dir": "x", "num_steps": 3}, Profile(folder="x", num_steps=3)),
        ("/stop_profile", {}, "stop"),
        ("/start_expert_distribution_record", {}, ("start", "")),
        ("/stop_expert_distribution_record", {}, ("stop", "")),
        ("/dump_expert_distribution_record", {"output_dir": "x"}, ("dump", "x")),
        ("/close_session", {"session_id": "s"}, ("close", "s")),
    ],
)
async def test_orders_reach_the_service(path: str, body: dict[str, Any], expected: Any) -> None:
    service = FakeService()
    response = await call(service, path, **body)
    assert response.status_code == 200 and service.controls.calls == [expected]


async def test_the_cache_is_flushed_by_get_as_well() -> None:
    service = FakeService()
    assert "7 pages" in (await call(service, "/flush_cache", "GET")).text and service.controls.calls == [
        "flush"
    ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause_generation", {"mode": "gently"}, "mode"),
        ("/pause_generation", {"made": "abort"}, "made"),
        ("/abort_request", {}, "rid"),
    ],
)
async def test_wrong_orders_are_refused(path: str, body: dict[str, Any], param: str) -> None:
    service = FakeService()
    response = await call(service, path, **body)
    assert (
        response.status_code == 400
        and response.json()["error"]["param"] == param
        and not service.controls.calls
    )


@pytest.mark.parametrize(("error", "status"), [(Busy("in use"), 400), (Unavailable("loading"), 503)])
@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation", "/flush_cache"])
async def test_what_cannot_be_done_is_refused(path: str, error: Any, status: int) -> None:
    response = await call(FakeService(controls=FakeControls(busy=error)), path)
    assert response.status_code == status and response.json()["error"]["message"] == error.message


async def test_a_paused_server_is_well_but_generates_nothing() -> None:
    service = FakeService(state="paused")
    response = await call(service, "/health", "GET")
    assert response.status_code == 200 and response.json()["state"] == "paused"
    assert (await call(service, "/ping", "GET")).status_code == 200
    assert (await call(service, "/health_generate", "GET")).status_code == 503 and not service.requests


async def test_load_in_the_forms_of_sglang() -> None:
    load = (await call(FakeService(), "/v1/loads", "GET")).json()
    one = load["loads"][0]
    assert (
        one["num_used_tokens"],
        one["num_cached_tokens"],
        one["max_total_num_tokens"],
        one["token_usage"],
    ) == (48, 16, 160, 0.3)
    assert load["aggregate"]["total_reqs"] == one["num_total_reqs"] == 0
    assert (await call(FakeService(), "/get_load", "GET")).json()[0]["num_tokens"] == 48


async def test_open_requests_are_listed_without_texts() -> None:
    service = FakeService()
    answer = await call(service, "/open_requests", "GET")
    assert service.controls.calls == [("open_requests", 500)]
    assert answer.json() == {
        "total": 2,
        "requests": [
            {
                "rid": "r1",
                "tenant": "t",
                "state": "running",
                "age_s": 1.5,
                "prompt_tokens": 3,
                "cached_tokens": 0,
                "completion_tokens": 0,
                "max_completion_tokens": 0,
            }
        ],
    }
