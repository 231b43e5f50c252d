"""POST /generate in SGLang's form."""

import json
from typing import Any

import httpx
import pytest

from runtime.http.app import http_app
from runtime.messages.requests import SessionParams
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio


async def ask(service: FakeService, method: str = "POST", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
    ) as http:
        response = await http.request(method, "/generate", json=body)
    assert response.status_code == 200, response.text
    return response


def stream_events(response: httpx.Response) -> list[Any]:
    assert response.text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_one_prompt_gives_one_answer(method: str) -> None:
    service = FakeService()
    answer = (
        await ask(
            service, method, text="hi", sampling_params={"max_new_tokens": 4, "temperature": 0}, rid="mine"
        )
    ).json()
    assert set(answer) == {"text", "output_ids", "meta_info"} and len(answer["output_ids"]) == 4
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "cached_tokens": 3,
        "cached_tokens_details": {"device": 3, "host": 0},
        "weight_version": "default",
    }
    assert service.requests[0].id == "mine" and service.requests[0].params.temperature == 0


async def test_defaults_are_those_of_sglang() -> None:
    service = FakeService(defaults={"temperature": 0.1})
    answer = (await ask(service, text="hi")).json()
    assert len(answer["output_ids"]) == 128 and service.requests[0].params.temperature == 1.0


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"text": ["a", "b"]}, 2),
        ({"text": ["a"]}, 1),
        ({"input_ids": [[1, 2], [3]]}, 2),
        ({"input_ids": [1, 2]}, 0),
        ({"text": "a"}, 0),
        ({"text": "a", "sampling_params": {"n": 2}}, 2),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, 3),
    ],
)
async def test_streams_end_as_whole_answers(body: dict[str, Any], count: int) -> None:
    whole = (await ask(FakeService(), **body)).json()
    assert isinstance(whole, list) == bool(count) and (not count or len(whole) == count)
    last: dict[int, Any] = {}
    for event in stream_events(await ask(FakeService(), **body, stream=True)):
        index = event.pop("index", 0)
        so_far = last.get(index, {"text": "", "output_ids": []})
        assert event["text"].startswith(so_far["text"]) and event["meta_info"]["prompt_tokens"] > 0
        assert event["meta_info"]["cached_tokens"] == 3
        last[index] = event
    for event, answer in zip([last[i] for i in sorted(last)], whole if count else [whole], strict=True):
        assert (event["text"], event["output_ids"]) == (answer["text"], answer["output_ids"])
        assert event["meta_info"]["finish_reason"] == answer["meta_info"]["finish_reason"]


async def test_lists_of_ids_and_parameters_belong_to_their_prompts() -> None:
    service = FakeService()
    answers = (
        await ask(
            service,
            text=["a", "b"],
            rid=["x", "y"],
            return_logprob=[False, True],
            top_logprobs_num=[0, 2],
            logprob_start_len=[-1, 0],
            return_text_in_logprobs=True,
            sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        )
    ).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert "output_token_logprobs" not in answers[0]["meta_info"]
    (plain,) = (await ask(service, text=["a"], return_logprob=True, top_logprobs_num=2)).json()
    assert plain["meta_info"]["input_token_logprobs"] == plain["meta_info"]["input_top_logprobs"] == []
    meta, ids = answers[1]["meta_info"], answers[1]["output_ids"]
    assert meta["output_token_logprobs"] == [[-0.5, i, f"<{i}>"] for i in ids]
    assert [[top[1] for top in tops] for tops in meta["output_top_logprobs"]] == [[i, i + 1] for i in ids]
    assert meta["input_token_logprobs"] == [[None, 98, "<98>"]] and meta["input_top_logprobs"] == [None]


async def test_log_probabilities_of_chosen_tokens() -> None:
    service = FakeService()
    answers = (
        await ask(
            service,
            text=["a", "b"],
            return_logprob=True,
            token_ids_logprob=[[5], [6, 7]],
            logprob_start_len=0,
            sampling_params={"max_new_tokens": 2},
        )
    ).json()
    assert [a.params.logprob_ids for a in service.requests] == [(5,), (6, 7)]
    assert answers[1]["meta_info"]["output_token_ids_logprobs"] == [[[-2.0, 6, None], [-2.0, 7, None]]] * 2
    assert answers[0]["meta_info"]["input_token_ids_logprobs"] == [None]
    await ask(service, text=["a", "b"], return_logprob=True, token_ids_logprob=[5])
    assert [a.params.logprob_ids for a in service.requests[2:]] == [(5,), (5,)]


async def test_times_in_the_body_and_in_headers() -> None:
    service = FakeService()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
    ) as http:
        await http.post(
            "/generate",
            json={"text": "a", "timeout": 5, "queue_timeout": 2},
            headers={"x-request-timeout": "3"},
        )
    assert (service.requests[0].timeout_s, service.requests[0].queue_timeout_s) == (3.0, 2.0)


async def test_a_session_is_named_in_the_ask() -> None:
    service = FakeService()
    await ask(service, text="hi", session_params={"id": "s", "rid": "before", "offset": 3, "replace": False})
    assert service.requests[0].session == SessionParams(id="s", rid="before", offset=3, replace=False)


async def test_prompt_logprobs_from_a_position_on() -> None:
    meta = (await ask(FakeService(), text="abcd", return_logprob=True, logprob_start_len=2)).json()[
        "meta_info"
    ]
    assert meta["input_token_logprobs"] == [[-0.25, 99, None], [-0.25, 100, None]]
    assert "input_top_logprobs" not in meta


async def test_no_new_tokens_score_the_prompt() -> None:
    """As SGLang has it: nothing is told but log probabilities, those of what would come first too."""
    body: dict[str, Any] = {
        "text": "hi",
        "return_logprob": True,
        "logprob_start_len": 0,
        "token_ids_logprob": [5],
        "sampling_params": {"max_new_tokens": 0},
    }
    service = FakeService()
    whole = (await ask(service, **body)).json()
    (event,) = stream_events(await ask(service, **body, stream=True))
    assert [one.params.max_new_tokens for one in service.requests] == [1, 1]
    for answer in (whole, event):
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert len(meta["input_token_logprobs"]) == 2 and len(meta["output_token_ids_logprobs"]) == 1
    pieces = stream_events(await ask(FakeService(), **body | {"text": ["a", "b"]}, stream=True))
    assert all(piece["text"] == "" and piece["output_ids"] == [] for piece in pieces) and len(pieces) == 2
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
    ) as http:
        refused = await http.post("/generate", json=body | {"session_params": {"id": "s"}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            400,
            "sampling_params.max_new_tokens",
        )


async def test_sglangs_other_fields_may_say_nothing() -> None:
    quiet = {
        "modalities": None,
        "return_bytes": False,
        "background": False,
        "bootstrap_room": None,
        "routed_experts_start_len": 0,
        "session_id": "s",
        "no_logs": True,
        "custom_labels": {},
        "image_data": [],
    }
    await ask(FakeService(), text="hi", **quiet)
    for name, value in (("custom_labels", {"a": "b"}), ("return_entropy", True), ("return_bytes", True)):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(http_app(FakeService())), base_url="http://test"
        ) as http:
            refused = await http.post("/generate", json={"text": "hi", name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
