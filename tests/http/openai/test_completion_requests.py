"""What parameters do to answers: with the openai client, and for a varied set of them that a stream says what
the whole says."""

import json
from typing import Any

import anyio
import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.http.app import http_app
from runtime.http.openai.chat import chat
from runtime.http.openai.completions import completions
from runtime.http.openai.logprobs import TextLogprobs
from runtime.http.streaming.pace import Pace
from runtime.messages.requests import Delta, Text, TokenLogprob, Tokens
from tests.http import fake
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES = {CHAT: chat, TEXT: completions}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 5},
    TEXT: {"prompt": "hi", "max_tokens": 5},
}


def http(service: FakeService) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(http_app(service)), base_url="http://test")


async def post(path: str, service: FakeService | None = None, **fields: Any) -> Any:
    async with http(service or FakeService()) as client:
        response = await client.post(path, json=BASE[path] | fields)
        assert response.status_code == 200, response.text
        if not fields.get("stream"):
            return response.json()
        lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


async def test_the_best_of_several() -> None:
    class Uneven(FakeService):
        """Answer 1 is the likeliest, then 3, 0, 2."""

        def _delta(self, running: Any, index: int, is_last: bool) -> Any:
            delta = super()._delta(running, index, is_last)
            delta.logprobs = [TokenLogprob(delta.token_ids[0], (-3.0, -1.0, -4.0, -2.0)[index], [])]
            return delta

    async with (
        serving(Uneven()) as (host, port),
        openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="x") as client,
    ):
        answer = await client.completions.create(model="org/fake", prompt="hi", max_tokens=5, n=2, best_of=4)
        every = await client.completions.create(model="org/fake", prompt="hi", max_tokens=5, n=4)
        assert [choice.text for choice in answer.choices] == [every.choices[1].text, every.choices[3].text]
        assert [choice.index for choice in answer.choices] == [0, 1] and answer.choices[0].logprobs is None
        assert answer.usage.completion_tokens == 20
        completion = await client.completions.create(
            model="org/fake", prompt=["hi", "ho"], max_tokens=5, best_of=4, logprobs=0, echo=True
        )
        assert [choice.text[:2] for choice in completion.choices] == ["hi", "ho"]
        assert all(set(choice.logprobs.token_logprobs[2:]) == {-1.0} for choice in completion.choices)
        with pytest.raises(openai.BadRequestError, match="streamed"):
            await client.completions.create(model="org/fake", prompt="hi", best_of=2, stream=True)
        assert await client.completions.create(model="org/fake", prompt="hi", n=2, best_of=2, stream=True)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_given_back(is_stream: bool) -> None:
    answer = await post(
        TEXT,
        prompt=[[5, 6], [7, 8]],
        echo=True,
        max_tokens=0,
        logprobs=1,
        stream=is_stream,
        **{"stream_options": {"include_usage": True}} if is_stream else {},
    )
    choices = [c for event in answer for c in event["choices"]] if is_stream else answer["choices"]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("<5><6>", "length"), ("<7><8>", "length")]
    assert [len(c["logprobs"]["tokens"]) for c in choices] == [2, 2] and choices[0]["logprobs"][
        "token_logprobs"
    ] == [None, -0.25]
    usage = (answer[-1] if is_stream else answer)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 0)


async def test_echo_without_logprobs_computes_none() -> None:
    service = FakeService()
    answer = await post(TEXT, service, echo=True)
    assert answer["choices"][0]["text"].startswith("hi") and answer["choices"][0]["logprobs"] is None
    assert service.requests[0].params.prompt_logprobs is None


async def test_token_ids() -> None:
    service = FakeService()
    whole = await post(TEXT, service, n=2, return_token_ids=True)
    expected = [[i for i, _ in fake.words(Text("hi"), index, 5)] for index in range(2)]
    assert [c["token_ids"] for c in whole["choices"]] == expected
    assert [c["prompt_token_ids"] for c in whole["choices"]] == [list(b"hi")] * 2
    chat = await post(CHAT, input_ids=[7, 8], return_token_ids=True, return_prompt_token_ids=True)
    assert chat["prompt_token_ids"] == chat["choices"][0]["prompt_token_ids"] == [7, 8]
    assert chat["choices"][0]["token_ids"] == [i for i, _ in fake.words(Tokens([7, 8]), 0, 5)]
    events = await post(CHAT, input_ids=[7, 8], return_token_ids=True, stream=True)
    assert [event.get("prompt_token_ids") for event in events] == [[7, 8], None]
    assert (
        sum([event["choices"][0].get("token_ids", []) for event in events], [])
        == chat["choices"][0]["token_ids"]
    )


async def test_tokens_by_their_ids() -> None:
    text = (await post(TEXT, logprobs=1, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
    plain = (await post(TEXT, logprobs=1))["choices"][0]["logprobs"]
    ids = [i for i, _ in fake.words(Text("hi"), 0, 5)]
    assert text["tokens"] == [f"token_id:{i}" for i in ids] and list(text["top_logprobs"][0]) == [
        f"token_id:{ids[0]}"
    ]
    assert text["text_offset"] == plain["text_offset"] and plain["tokens"][0] == f"<{ids[0]}>"
    chat = (await post(CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True))["choices"][0][
        "logprobs"
    ]["content"][0]
    assert (
        chat["token"].startswith("token_id:")
        and chat["top_logprobs"][0]["token"] == chat["token"]
        and chat["bytes"]
    )


async def test_log_probabilities_of_named_tokens() -> None:
    chat = (await post(CHAT, logprobs=True, logprob_token_ids=[3, 4]))["choices"][0]["logprobs"]["content"]
    assert [[top["token"] for top in token["top_logprobs"]] for token in chat] == [["<3>", "<4>"]] * 5
    text = (await post(TEXT, logprobs=0, logprob_token_ids=[3]))["choices"][0]["logprobs"]["top_logprobs"]
    assert all(top["<3>"] == -2.0 and len(top) == 2 for top in text)


async def test_log_probabilities_of_the_prompt() -> None:
    text = (await post(TEXT, prompt=["abc", "d"], prompt_logprobs=2))["choices"]
    assert (
        text[0]["logprobs"] is None
        and text[0]["prompt_logprobs"][0] is None
        and text[1]["prompt_logprobs"] == [None]
    )
    assert text[0]["prompt_logprobs"][1] == {
        "98": {"logprob": -0.5, "rank": 1, "decoded_token": "<98>"},
        "99": {"logprob": -1.5, "rank": 2, "decoded_token": "<99>"},
    }
    chat = await post(CHAT, input_ids=[1, 2], prompt_logprobs=0)
    assert chat["prompt_logprobs"] == [None, {"2": {"logprob": -0.25, "rank": None, "decoded_token": "<2>"}}]
    both = (await post(TEXT, prompt="ab", echo=True, logprobs=0, prompt_logprobs=3))["choices"][0]
    assert both["logprobs"]["top_logprobs"] is None and len(both["prompt_logprobs"][1]) == 3


async def test_names_of_requests() -> None:
    service = FakeService(hold=True)
    async with http(service) as client, anyio.create_task_group() as tasks:

        async def ask() -> None:
            assert (await client.post(TEXT, json={"prompt": "x", "rid": "mine"})).json()["id"] == "mine"

        tasks.start_soon(ask)
        while not service.running:
            await anyio.lowlevel.checkpoint()
        assert list(service.running) == ["mine"]
        service.run()
    service = FakeService()
    await post(TEXT, service, prompt=["a", "b"], rid=["one", "two"])
    await post(TEXT, service, prompt=["a", "b"], request_id="both")
    assert (await post(CHAT, service, rid="talk"))["id"] == "talk"
    assert [request.id for request in service.requests] == ["one", "two", "both-0", "both-1", "talk"]
    service = FakeService(refuse=InvalidRequest("a request with this id is running", param="id"))
    async with http(service) as client:
        for name, path in (("rid", CHAT), ("request_id", CHAT), ("rid", TEXT), ("request_id", TEXT)):
            assert (await client.post(path, json=BASE[path] | {name: "x"})).json()["error"]["param"] == name


async def test_prompts_of_other_kinds() -> None:
    service = FakeService()
    await post(TEXT, service, add_special_tokens=False)
    await post(CHAT, service, documents=[{"title": "t"}], reasoning={"effort": "high"})
    await post(CHAT, service, reasoning_effort="none")
    await post(CHAT, service, reasoning={"enabled": True}, chat_template_kwargs={"thinking": False})
    assert service.requests[0].prompt == Text("hi", add_special=False)
    args = [request.prompt.template_args for request in service.requests[1:]]  # type: ignore[union-attr]
    assert args == [
        {
            "reasoning_effort": "high",
            "enable_thinking": True,
            "thinking": True,
            "documents": [{"title": "t"}],
        },
        {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        {"thinking": False},
    ]


def stream(path: str, **fields: Any) -> list[Any]:
    """The chunks of an answer that is written token by token, as on a connection that has room."""
    answer = ROUTES[path](FakeService(), json.dumps(BASE[path] | fields | {"stream": True}).encode())
    written: list[bytes] = []

    def take(choice: int, delta: Delta) -> None:
        written.append(answer.answer_format.events(choice, delta))

    answer.exchange.submit(take if answer.interval == 1 else Pace(take, answer.interval))
    lines = (b"".join(written) + answer.answer_format.tail()).decode().split("\n")
    assert lines[-3] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-3] if line]


def test_fewer_and_longer_chunks() -> None:
    events = stream(TEXT, max_tokens=9, stream_interval=4)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "length"]
    assert len(stream(TEXT, max_tokens=9)) == 9


def joined(path: str, events: list[Any]) -> tuple[list[Any], Any]:
    """The choices and the usage that a stream's chunks amount to."""
    found: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            so_far = found.setdefault(
                choice["index"], {"text": "", "token_ids": [], "logprobs": None, "prompt_token_ids": None}
            )
            so_far["text"] += (choice["text"] if path == TEXT else choice["delta"].get("content")) or ""
            so_far["token_ids"] += choice.get("token_ids", [])
            so_far["prompt_token_ids"] = choice.get("prompt_token_ids") or so_far["prompt_token_ids"]
            so_far["finish_reason"] = choice["finish_reason"]
            so_far["matched_stop"] = choice.get("matched_stop")
            if (logprobs := choice["logprobs"]) is not None:
                before = so_far["logprobs"]
                so_far["logprobs"] = (
                    logprobs
                    if before is None
                    else {
                        name: one if (one := before[name]) is None else one + logprobs[name]
                        for name in logprobs
                    }
                )
    return [found[index] for index in sorted(found)], usage


def content_of(path: str, answer: Any) -> tuple[list[Any], Any]:
    return [
        {
            "text": choice["text"] if path == TEXT else choice["message"]["content"],
            "token_ids": choice.get("token_ids", []),
            "logprobs": choice["logprobs"],
            "prompt_token_ids": choice.get("prompt_token_ids"),
            "finish_reason": choice["finish_reason"],
            "matched_stop": choice.get("matched_stop"),
        }
        for choice in answer["choices"]
    ], answer["usage"]


flags = st.booleans()
shared = {
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 12),
    "return_token_ids": flags,
    "return_tokens_as_token_ids": flags,
    "seed": st.integers(0, 9),
    "temperature": st.sampled_from([0, 0.5, 1]),
}
pacing = st.fixed_dictionaries(
    {},
    optional={
        "stream_interval": st.integers(1, 5),
        "stream_options": st.fixed_dictionaries(
            {"include_usage": st.just(True)}, optional={"continuous_usage_stats": flags}
        ),
    },
)
BODIES = {
    TEXT: st.fixed_dictionaries(
        {},
        optional=shared
        | {
            "prompt": st.sampled_from(["one", ["one", "two"], [1, 2, 3], [[1], [2, 999]]]),
            "echo": flags,
            "logprobs": st.integers(0, 3),
            "max_tokens": st.integers(0, 12),
            "add_special_tokens": flags,
        },
    ),
    CHAT: st.fixed_dictionaries(
        {},
        optional=shared
        | {
            "top_logprobs": st.integers(0, 3),
            "return_prompt_token_ids": flags,
            "input_ids": st.just([4, 999]),
        },
    ),
}


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stream_says_what_the_whole_says(path: str, data: st.DataObject) -> None:
    fields, pace = data.draw(BODIES[path]), data.draw(pacing)
    if "top_logprobs" in fields:
        fields["logprobs"] = True
    if fields.get("max_tokens") == 0:
        fields["echo"] = True

    answer = ROUTES[path](FakeService(), json.dumps(BASE[path] | fields).encode())
    whole, usage = content_of(path, msgspec.to_builtins(anyio.run(answer.complete)))
    assert joined(path, stream(path, **fields, **pace)) == (
        whole,
        usage if "stream_options" in pace else None,
    )


async def test_usage_counts_what_waited_for_a_slow_reader() -> None:
    """Deltas that come before anything is sent are written together with the tail, which counts them."""
    events = await post(TEXT, stream=True, stream_options={"include_usage": True})
    assert len(events) == 2 and events[-1]["usage"]["completion_tokens"] == 5


def test_offsets_are_those_of_characters_where_tokens_are_parts_of_them() -> None:
    pieces = [b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"ab", b"c"]
    lines = TextLogprobs(pieces.__getitem__, 0)
    tokens = [TokenLogprob(at, -1.0, ()) for at in range(len(pieces))]
    found = [lines.add(tokens[:3])["text_offset"], lines.add(tokens[3:])["text_offset"]]  # two chunks
    assert found == [[0, 0, 1], [1, 2, 4]]
