"""Every refusal is a 4xx with an error object that names the field, and the server goes on."""

import json
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from runtime.errors import InvalidRequest, NotFound, Overloaded, RequestError, TooLarge, Unavailable
from runtime.http.app import http_app
from runtime.http.errors import error_object
from runtime.http.settings import DEFAULT, HttpSettings
from tests.http.fake import FakeService
from tests.http.serving import Raw, serving

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    GENERATE: {"text": "hi"},
}
OPENAI = (CHAT, COMPLETIONS)
DEEP = b"[" * 100_000 + b"]" * 100_000

RAW = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"{}{}",
    b"\xff\xfe",
    b"{'a': 1}",
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"model": "\\ud800"}',
    b'{"user": "\xc3\x28"}',
    DEEP,
    b'{"metadata": {"a": ' + DEEP + b"}}",
    b'{"x":' + b'{"x":' * 100_000,
]

# fields, param: on both OpenAI routes
SHARED: list[tuple[dict[str, Any], str]] = [
    ({"n": 5_000_000}, "n"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 10**40}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"speculation": {"max_draft_tokens": 256}}, "speculation.max_draft_tokens"),
    ({"speculation": {"drafts": 1}}, "speculation.drafts"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"logit_bias": {"1": 1e39}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logit_bias": {str(2**70): 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": {}}, "stop"),
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"model": "gpt-4"}, "model"),
    ({"model": 7}, "model"),
    ({"temprature": 1}, "temprature"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"regex": "a*", "ebnf": "root ::= x"}, "ebnf"),
    ({"regex": 3}, "regex"),
]
# route, fields, param
OWN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [1]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP.decode()}}]}
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 5000}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 1001}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"tools": [1]}, "tools[0]"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"modalities": ["audio"]}, "modalities[0]"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [1000]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**40]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [1000], "echo": True}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt"),
    (COMPLETIONS, {"prompt": "a" * 200_000}, "prompt"),
    (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
    (COMPLETIONS, {"best_of": 5000}, "best_of"),
    (COMPLETIONS, {"rid": ["a", "b"]}, "rid"),
    (COMPLETIONS, {"rid": ""}, "rid"),
    (COMPLETIONS, {"prompt": ["a", "b"], "rid": ["c", "c"]}, "rid"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
    (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
    (CHAT, {"logprobs": True, "logprob_token_ids": [1000]}, "logprob_token_ids"),
    (CHAT, {"stream_interval": 0}, "stream_interval"),
    (CHAT, {"input_ids": []}, "input_ids"),
    (CHAT, {"input_ids": [1000]}, "input_ids"),
    (CHAT, {"chat_template": "x"}, "chat_template"),
    (CHAT, {"echo": True}, "echo"),
    (COMPLETIONS, {"length_penalty": 2}, "length_penalty"),
    (CHAT, {"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
    (COMPLETIONS, {"prompt": [1, 2], "suffix": "x"}, "suffix"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"logprobs": 1001}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (GENERATE, {"text": None}, "text"),
    (GENERATE, {"input_ids": [1]}, "text"),
    (GENERATE, {"text": []}, "text"),
    (GENERATE, {"text": ""}, "text"),
    (GENERATE, {"text": None, "input_ids": [1000]}, "input_ids"),
    (GENERATE, {"text": None, "input_ids": [1, [2]]}, "input_ids"),
    (GENERATE, {"text": None, "input_ids": ["a"]}, "input_ids[0]"),
    (GENERATE, {"rid": ["a", "b"]}, "rid"),
    (GENERATE, {"rid": ""}, "rid"),
    (GENERATE, {"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    (GENERATE, {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    (GENERATE, {"sampling_params": {"n": 5_000_000}}, "sampling_params.n"),
    (GENERATE, {"sampling_params": {"seed": 1}}, "sampling_params.seed"),
    (GENERATE, {"sampling_params": {"sampling_seed": 2**63}}, "sampling_params.sampling_seed"),
    (GENERATE, {"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
    (GENERATE, {"sampling_params": {"logit_bias": {"5": 1e300}}}, "sampling_params.logit_bias"),
    (GENERATE, {"sampling_params": {"stop_token_ids": [1000]}}, "sampling_params.stop_token_ids"),
    (GENERATE, {"sampling_params": {"json_schema": "{}", "regex": "a"}}, "sampling_params.regex"),
    (GENERATE, {"return_logprob": True, "top_logprobs_num": 1001}, "top_logprobs_num"),
    (GENERATE, {"logprob_start_len": -2}, "logprob_start_len"),
    (GENERATE, {"image_data": "x"}, "image_data"),
    (GENERATE, {"txt": "x"}, "txt"),
]
CASES = [(path, fields, param) for path in OPENAI for fields, param in SHARED] + OWN


def client(service: FakeService, settings: HttpSettings = DEFAULT) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(http_app(service, settings)), base_url="http://test"
    )


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (
        set(error) == {"message", "type", "param", "code"}
        and error["message"]
        and error["type"]
        and error["code"]
    )
    return error


@pytest.mark.parametrize("path", BASE)
async def test_what_is_not_the_json_of_a_request(path: str) -> None:
    async with client(FakeService()) as http:
        for raw in RAW:
            error_of(await http.post(path, content=raw), 400)
        assert (await http.post(path, json=BASE[path])).status_code == 200


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (
            b'{"user": "cut in \\ud83d"}',
            r"\ud83d is half a surrogate pair (byte 17); send the whole character",
        ),
        (b'{"user": "\\uDE00"}', r"\uDE00 is half a surrogate pair (byte 10)"),
        (b'{"user": "\\ud83d\\ude00", "n', "truncated"),
        (b"\xef\xbb\xbf{}", "begins with a byte order mark"),
    ],
)
async def test_what_json_cannot_hold_is_named(raw: bytes, fault: str) -> None:
    async with client(FakeService()) as http:
        assert fault in error_of(await http.post(CHAT, content=raw), 400)["message"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BASE)
async def test_wrong_fields_are_named(path: str, is_stream: bool) -> None:
    service = FakeService()
    async with client(service) as http:
        for _, fields, param in [case for case in CASES if case[0] == path]:
            body = BASE[path] | ({"stream": is_stream} if "stream_options" not in fields else {}) | fields
            response = await http.post(
                path, content=json.dumps({k: v for k, v in body.items() if v is not None or k in fields})
            )
            error = error_of(response, 404 if fields.get("model") == "gpt-4" else 400)
            assert error["param"] == param, (fields, error)
        assert service.running == {} and service.aborted == []
        assert (await http.post(path, json=BASE[path])).status_code == 200


async def test_unknown_fields_suggest_the_nearest() -> None:
    async with client(FakeService()) as http:
        error = error_of(await http.post(CHAT, json=BASE[CHAT] | {"temprature": 1}), 400)
    assert "did you mean temperature?" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "'king' is none of assistant, developer, "),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type must be text, json_object"),
        (CHAT, {"logit_bias": {"x": 1}}, "a key of logit_bias: expected int, got str"),
        ("/v1/messages", {"tool_choice": {"type": "foo"}}, "tool_choice.type: 'foo' is none of "),
    ],
)
async def test_refusals_say_what_a_field_takes(path: str, body: dict[str, Any], message: str) -> None:
    async with client(FakeService()) as http:
        response = await http.post(path, json=BASE[CHAT] | {"max_tokens": 5} | body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize("path", BASE)
async def test_an_empty_body_is_called_empty(path: str) -> None:
    async with client(FakeService()) as http:
        assert "the body is empty" in error_of(await http.post(path), 400)["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/models", "/v1/models"),
        ("/v1/v1/chat/completions", CHAT),
        ("//v1/chat/completions", CHAT),
        ("/openai/v1/completions", COMPLETIONS),
        ("/v1/chat/completion", CHAT),
        ("/v1/generate", GENERATE),
        ("/v1/api/chat", "/api/chat"),
        ("/nowhere", None),
        ("/v1/nothing", None),
    ],
)
async def test_the_path_that_was_meant_is_named(path: str, meant: str | None) -> None:
    """Most wrong paths come from a base URL with /v1 too few or too many."""
    async with client(FakeService()) as http:
        error = error_of(await http.post(f"http://test{path}"), 404)
    assert error["message"] == f"there is no route {path}" + (f"; did you mean {meant}?" if meant else "")


async def test_a_slash_behind_models_changes_nothing() -> None:
    async with client(FakeService()) as http:
        assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", GENERATE, 405),
        ("POST", "/health", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/models/gpt-4", 404),
        ("POST", "/", 405),
    ],
)
async def test_wrong_routes(method: str, path: str, status: int) -> None:
    async with client(FakeService()) as http:
        error_of(await http.request(method, path), status)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("full"), 429),
        (Unavailable("loading"), 503),
        (InvalidRequest("no", param="prompt"), 400),
        (NotFound("no"), 404),
    ],
)
async def test_what_the_service_raises(error: RequestError, status: int) -> None:
    async with client(FakeService(refuse=error)) as http:
        for path, body in BASE.items():
            response = await http.post(path, json=body | {"stream": True})
            error_of(response, status)
            assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_a_refused_ask_of_a_batch_ends_the_others() -> None:
    class Full(FakeService):
        def submit(self, ask: Any, sink: Any) -> None:
            if len(self.requests) == 2:
                raise Overloaded("the queue is full")
            super().submit(ask, sink)

    service = Full(hold=True)
    async with client(service) as http:
        error_of(await http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]}), 429)
    assert (
        sorted(service.aborted) == sorted(request.id for request in service.requests)
        and service.running == {}
    )


async def test_bugs_are_reported_without_details() -> None:
    class Broken(FakeService):
        def submit(self, ask: Any, sink: Any) -> None:
            raise ZeroDivisionError("secret")

    transport = httpx.ASGITransport(http_app(Broken()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        error = error_of(await http.post(CHAT, json=BASE[CHAT]), 500)
    assert "secret" not in error["message"]


async def test_bodies_over_the_limit_on_the_wire() -> None:
    service = FakeService()
    async with serving(service) as address:
        for declared in (True, False):
            async with Raw.connected(address) as raw:
                if declared:
                    await raw.send(CHAT, b"x" * 1000, declared=20_000_000)
                else:
                    await raw.write(
                        f"POST {CHAT} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode()
                    )
                    with anyio.move_on_after(20):
                        piece = b"x" * 2**20
                        for _ in range(17):
                            await raw.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                answer = await raw.until(b"}}")
                assert answer.startswith(b"HTTP/1.1 413") and b"request_too_large" in answer
        async with httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}") as http:
            error_of(await http.post(GENERATE, content=b" " * 20_000_000), 413)
            assert (await http.post(GENERATE, json={"text": "x"})).status_code == 200


async def test_the_limit_is_an_option() -> None:
    async with client(FakeService(), HttpSettings(max_body_bytes=10)) as http:
        error_of(await http.post(CHAT, json=BASE[CHAT]), 413)


def test_error_objects_have_the_four_fields() -> None:
    assert msgspec.to_builtins(error_object(TooLarge("m", param="p"))) == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": "request_too_large"}
    }
