"""Images, videos and sounds in the bodies of every API: what a request's media become, in which order, and
what the chat template is given."""

from typing import Any

import httpx
import pytest

from runtime.http.app import http_app
from runtime.messages.media import MediaKind, MediaSource
from runtime.messages.requests import Chat, GenerateRequest
from tests.http.fake import FakeService

pytestmark = pytest.mark.anyio
URL = "https://example.com/a.png"
DATA = "data:image/png;base64,AAAA"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
IMAGE, TEXT = {"type": "image", "image": ""}, {"type": "text", "text": "What?"}
VIDEO, AUDIO = {"type": "video", "video": ""}, {"type": "audio", "audio": ""}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def seeing(*kinds: MediaKind) -> FakeService:
    """A double that takes media, of all kinds if none are given, and records requests."""
    return FakeService(media_kinds=frozenset(kinds or MediaKind))


async def post(service: FakeService, path: str, body: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.post(path, json=body)


async def taken(path: str, body: dict[str, Any]) -> list[GenerateRequest]:
    service = seeing()
    answer = await post(service, path, body)
    assert answer.status_code == 200, answer.text
    return service.requests


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def source(param: str, kind: MediaKind = MediaKind.IMAGE, **more: str) -> MediaSource:
    return MediaSource(kind=kind, param=param, **more)


def shown(request: GenerateRequest) -> list[Any]:
    assert isinstance(request.prompt, Chat)
    return [message["content"] for message in request.prompt.messages]


async def test_openai_parts() -> None:
    (request,) = await taken(
        CHAT,
        user(
            TEXT,
            {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
            {"type": "image_url", "image_url": DATA},
            {"type": "video_url", "video_url": {"url": URL}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": URL}},
        ),
    )
    place = "messages[0].content"
    assert request.media == (
        source(f"{place}[1].image_url.url", url=URL),
        source(f"{place}[2].image_url", url=DATA),
        source(f"{place}[3].video_url.url", MediaKind.VIDEO, url=URL),
        source(f"{place}[4].input_audio.data", MediaKind.AUDIO, base64="AAAA"),
        source(f"{place}[5].audio_url.url", MediaKind.AUDIO, url=URL),
    )
    assert shown(request) == [[TEXT, IMAGE, IMAGE, VIDEO, AUDIO, AUDIO]]


async def test_texts_alone_stay_one_text() -> None:
    (request,) = await taken(CHAT, user(TEXT, TEXT))
    assert shown(request) == ["What?\nWhat?"] and request.media == ()


async def test_responses_parts() -> None:
    items = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What?"},
                {"type": "input_image", "image_url": URL, "detail": "auto"},
                {"type": "input_file", "filename": "a.png", "file_data": DATA},
                {"type": "input_file", "file_url": URL},
            ],
        },
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_image", "image_url": DATA}, {"type": "input_text", "text": "What?"}],
        },
    ]
    (request,) = await taken(RESPONSES, {"input": items})
    assert request.media == (
        source("input[0].content[1].image_url", url=URL),
        source("input[0].content[2].file_data", url=DATA),
        source("input[0].content[3].file_url", url=URL),
        source("input[2].output[0].image_url", url=DATA),
    )
    assert shown(request) == [[TEXT, IMAGE, IMAGE, IMAGE], "", [IMAGE, TEXT]]


async def test_anthropic_blocks() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    linked = {"type": "image", "source": {"type": "url", "url": URL}}
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, picture], "is_error": True}
    body = {
        "model": "org/fake",
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": [picture, TEXT, linked]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, TEXT]},
        ],
    }
    (request,) = await taken(MESSAGES, body)
    assert request.media == (
        source("messages[0].content[0].source.data", base64="AAAA"),
        source("messages[0].content[2].source.url", url=URL),
        source("messages[2].content[0].content[1].source.data", base64="AAAA"),
    )
    failed = {"type": "text", "text": "Error: "}
    assert shown(request) == [[IMAGE, TEXT, IMAGE], "", [failed, TEXT, IMAGE], "What?"]


async def test_ollama_images() -> None:
    message = {"role": "user", "content": "What?", "images": ["AAAA", "BBBB"]}
    (request,) = await taken("/api/chat", {"model": "org/fake", "stream": False, "messages": [message]})
    assert request.media == tuple(
        source(f"messages[0].images[{i}]", base64=data) for i, data in enumerate(("AAAA", "BBBB"))
    )
    assert shown(request) == [[IMAGE, IMAGE, TEXT]]
    prompt = {"model": "org/fake", "stream": False, "prompt": "What?", "images": ["AAAA"]}
    (request,) = await taken("/api/generate", prompt)
    assert request.media == (source("images[0]", base64="AAAA"),)
    assert shown(request) == [[IMAGE, TEXT]]
    refused = await post(seeing(), "/api/generate", prompt | {"raw": True})
    assert refused.status_code == 400 and "leave raw and suffix out" in refused.text


async def native(**body: Any) -> list[GenerateRequest]:
    service = seeing()
    transport = httpx.ASGITransport(http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return service.requests


async def test_native_fields() -> None:
    one, two = source("image_data[0]", url=URL), source("image_data[1]", base64="AAAA")
    (request,) = await native(text="<image><image>", image_data=[URL, "AAAA"])
    assert request.media == (one, two)
    (request,) = await native(text="<image><audio>", image_data="AAAA", audio_data=URL, video_data=DATA)
    assert request.media == (
        source("image_data", base64="AAAA"),
        source("video_data", MediaKind.VIDEO, url=DATA),
        source("audio_data", MediaKind.AUDIO, url=URL),
    )
    requests = await native(text=["a", "b", "c"], image_data=[[URL, "AAAA"], None, DATA])
    assert [request.media for request in requests] == [
        (source("image_data[0][0]", url=URL), source("image_data[0][1]", base64="AAAA")),
        (),
        (source("image_data[2][0]", url=DATA),),
    ]
    requests = await native(text=["a", "b"], image_data=DATA)
    assert [request.media for request in requests] == [(source("image_data", url=DATA),)] * 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            CHAT,
            user({"type": "image_url", "image_url": {"url": URL}}),
            "messages[0].content[0].image_url.url",
        ),
        (CHAT, user({"type": "image_url"}), "messages[0].content[0].image_url"),
        (CHAT, user({"type": "input_audio", "input_audio": {}}), "messages[0].content[0].input_audio.data"),
        ("/generate", {"text": "x", "image_data": URL}, "image_data"),
        ("/generate", {"text": ["x", "y"], "image_data": [URL]}, "image_data"),
        ("/generate", {"text": "x", "video_data": [["A"], "B"]}, "video_data"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
            "input[0].content[0].file_id",
        ),
    ],
)
async def test_refusals_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    service = FakeService()
    transport = httpx.ASGITransport(http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        refused = await http.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_a_model_says_what_it_takes() -> None:
    service = seeing(MediaKind.IMAGE)
    refused = await post(service, CHAT, user({"type": "video_url", "video_url": URL}))
    assert refused.status_code == 400 and "takes no videos; send text, images alone" in refused.text
    refused = await post(FakeService(), CHAT, user({"type": "image_url", "image_url": URL}))
    assert refused.status_code == 400 and "takes no images; send text alone" in refused.text


async def test_counting_gets_the_media() -> None:
    """Tokens of images count; the double has none, and says that it was asked."""
    asked: list[Any] = []
    service = seeing()

    async def tokenize(prompt: Any, media: Any = ()) -> list[int]:
        asked.append((prompt, list(media)))
        return [1, 2, 3]

    service.control.tokenize = tokenize  # type: ignore[method-assign]
    block = {"type": "image", "source": {"type": "url", "url": URL}}
    body = {"messages": [{"role": "user", "content": [block]}]}
    counted = await post(service, "/v1/messages/count_tokens", {"model": service.card.name} | body)
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]
    also = await post(service, "/v1/responses/input_tokens", {"input": items})
    assert (counted.json(), also.json()["input_tokens"]) == ({"input_tokens": 3}, 3), also.text
    assert [media for _, media in asked] == [
        [source("messages[0].content[0].source.url", url=URL)],
        [source("input[0].content[0].image_url", url=URL)],
    ]
