"""/configure_logging and /set_internal_state, in SGLang's form."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.testclient import TestClient

from runtime import Engine, log
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.settings import HttpSettings
from tests.http.fake import FakeService

BOTH = (("/configure_logging", {"log_requests": True}), ("/set_internal_state", {"server_args": {}}))


def test_they_need_the_admin_key() -> None:
    keys = Keys(["user"], "admin")
    with TestClient(http_app(FakeService(), HttpSettings(keys=keys))) as http:
        for path, body in BOTH:
            for key, status in (("user", 401), ("admin", 200)):
                answer = http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/configure_logging", {"log_requests_level": 9}, "log_requests_level"),
        ("/configure_logging", {"log_level": "loud"}, "log_level"),
        ("/configure_logging", {"dump_requests_folder": "/x"}, "dump_requests_folder"),
        ("/configure_logging", {"crash_dump_folder": "/x"}, "crash_dump_folder"),
        ("/configure_logging", {"nonsense": 1}, "nonsense"),
        ("/set_internal_state", {"server_args": {"port": 2}}, "server_args.port"),
        ("/set_internal_state", {"server_args": {"nonsense": 2}}, "server_args.nonsense"),
    ],
)
def test_refusals(path: str, body: dict[str, Any], param: str) -> None:
    service = FakeService()
    with TestClient(http_app(service)) as http:
        answer = http.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
        assert service.control.calls == []


def test_options_that_hold_already_are_accepted() -> None:
    with TestClient(http_app(FakeService())) as http:
        assert http.post("/set_internal_state", json={"server_args": {"port": 1}}).json() == [True]


@pytest.mark.anyio
async def test_requests_are_logged_from_then_on(tmp_path: Path) -> None:
    async with (
        Engine(
            device="null",
            admin_api_key="admin",
            log_requests=True,
            log_requests_target=[str(tmp_path)],
            log_requests_level=0,
        ) as engine,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(engine.asgi()),
            base_url="http://here",
            timeout=60,
            headers={"x-api-key": "admin"},
        ) as http,
    ):

        async def say(rid: str, **settings: Any) -> dict[str, Any]:
            shown = await http.post("/configure_logging", json=settings)
            assert shown.status_code == 200, shown.text
            body = {"text": "secret words", "rid": rid, "sampling_params": {"max_new_tokens": 2}}
            assert (await http.post("/generate", json=body)).status_code == 200
            return dict(shown.json())

        assert (await say("off", log_requests=False))["log_requests"] is False
        shown = await say("metadata", log_requests=True, log_requests_format="json")
        assert (shown["log_requests"], shown["log_requests_level"]) == (True, 0)
        assert (await say("all", log_requests_level=3))["log_requests_format"] == "json"
        await say("off again", log_requests=False)
    lines = [
        msgspec.json.decode(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()
    ]
    assert [line["rid"] for line in lines] == ["metadata", "metadata", "all", "all"]
    assert ["secret words" in str(line) for line in lines] == [False, False, True, False]


def test_the_level_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_level("debug")
    assert log.level() == "silent", "an application that uses the library writes its own log"
    log.setup("info")
    try:
        log.set_level("error")
        log.get("x").warning("quiet")
        assert log.level() == "error" and capsys.readouterr().err == ""
    finally:
        log.silence()
