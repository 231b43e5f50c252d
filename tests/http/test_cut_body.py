"""Files in bodies are taken out before the JSON is decoded, and are given back to the requests."""

import json
import os
import string
from base64 import b64encode
from typing import Any

import msgspec
import pytest

from runtime.errors import InvalidRequest
from runtime.http import cut_body
from runtime.http.cut_body import MIN_BYTES, CutBody, attempt, put_back, uncut
from runtime.memory_file import MemoryFile
from runtime.messages.media import MediaKind, MediaSource
from runtime.messages.requests import GenerateRequest, Tokens
from runtime.messages.sampling import SamplingParams

ALPHABET = string.ascii_letters + string.digits + "+/-_="
FILE = b64encode(bytes(range(256)) * (MIN_BYTES // 256)).decode()
URL = f"data:image/png;base64,{FILE}"


def request(*media: MediaSource) -> GenerateRequest:
    return GenerateRequest(id="1", prompt=Tokens([1]), params=SamplingParams(), arrival_s=0.0, media=media)


def collected(body: bytes) -> MemoryFile:
    memory = MemoryFile()
    memory.append(body)
    return memory


def cut(body: bytes) -> CutBody:
    return cut_body.cut(collected(body))


def image(**fields: Any) -> MediaSource:
    return MediaSource(kind=MediaKind.IMAGE, param="image", **fields)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("text, head", [(FILE, ""), (URL, "data:image/png;base64,"), (f"{FILE}==", "")])
def test_base64_is_taken_out_and_given_back(text: str, head: str, indent: int | None) -> None:
    body = json.dumps(
        {"before": "a" * 99, "files": [text, text], "after": ["b"] * 99}, indent=indent
    ).encode()
    found = cut(body)
    assert len(found.content) < 4096 and found.whole == body and found.num_bytes == len(body)
    files = json.loads(found.content)["files"]
    assert len(set(files)) == 2 and all(file.startswith(head) for file in files)
    sources = [image(url=file) if head else image(base64=file) for file in files]
    given = put_back([request(sources[0]), request(sources[1], sources[0])], found.texts)
    assert given is not None
    for one in (*given[0].media, *given[1].media):
        assert (one.url, one.base64) == (head, "")
        assert one.encoded is not None and one.url + one.encoded.read().decode() == text


@pytest.mark.parametrize(
    "body",
    [
        f'{{"a": "{FILE[: MIN_BYTES // 2]}"}}',
        f'{{"a": "{"some text " * MIN_BYTES}"}}',
        f'{{"a": "{FILE[:99]}\\n{FILE}"}}',
        f'{{"a": "é{FILE}"}}',
        f'{{"a": [{"1," * MIN_BYTES}1], "b": 1}}',
        f'{{"a": {"1" * 2 * MIN_BYTES}, "b": 1}}',
        f'{{"a": {" " * 2 * MIN_BYTES}1, "b": 1}}',
        f'{{"a": "{FILE}',
        "1" * 2 * MIN_BYTES,
        " " * 2 * MIN_BYTES + '"',
    ],
    ids=lambda body: body[:12],
)
def test_all_else_stays(body: str) -> None:
    data = body.encode()
    assert cut(data) == uncut(data)


def test_texts_are_found_wherever_they_begin() -> None:
    for shift in (0, 1, MIN_BYTES // 2 - 9, MIN_BYTES // 2 - 8, MIN_BYTES // 2, MIN_BYTES - 7, MIN_BYTES):
        body = json.dumps(["," * shift, FILE[:MIN_BYTES], 1]).encode()
        assert len(cut(body).texts) == 1, shift


@pytest.mark.parametrize("text", [FILE, f'"{FILE}'])
def test_a_text_that_is_no_file_is_decoded_as_it_came(text: str) -> None:
    """The second one ends a string that has a quote in it."""
    body = cut(json.dumps({"prompt": text}).encode())
    assert len(body.texts) == 1

    def take(content: bytes) -> str:
        return str(json.loads(content)["prompt"])

    assert attempt(body, take, lambda taken: put_back([request()], body.texts) is not None) == text


def test_a_refusal_is_that_of_the_body_as_it_came() -> None:
    body = cut(json.dumps({"n": FILE}).encode())

    def refuse(content: bytes) -> None:
        raise InvalidRequest(f"{len(content)} bytes")

    with pytest.raises(InvalidRequest, match=f"^{len(body.whole)} bytes"):
        attempt(body, refuse, lambda taken: True)


def test_marks_of_another_body_are_texts() -> None:
    first, second = (cut(json.dumps({"a": FILE}).encode()) for _ in range(2))
    (mark,) = first.texts
    assert put_back([request(image(base64=mark))], second.texts) is None


def test_bytes_that_stand_for_something_in_json_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is taken out where each of its bytes stands for itself, and none may be between two texts."""
    monkeypatch.setattr(cut_body, "MIN_BYTES", 64)
    for value in range(256):
        body = b'{"a": "' + b"A" * 100 + bytes([value]) + b"A" * 40 + b'"}'
        is_taken = bool(cut(body).texts)
        assert is_taken == (chr(value) == '"' or (ord("+") <= value <= ord("z") and chr(value) not in ",:\\"))
        assert is_taken or chr(value) not in ALPHABET


def test_content_is_json() -> None:
    body = cut(msgspec.json.encode({"a": URL, "b": [FILE, 1.5]}))
    assert json.loads(body.content)["b"][1] == 1.5


def test_files_cannot_be_changed_by_who_gets_their_descriptor() -> None:
    body = cut(json.dumps({"a": FILE}).encode())
    (text,) = body.texts.values()
    with pytest.raises(PermissionError):
        os.pwrite(text.memory.fd, b"!", text.begin)
    with pytest.raises(PermissionError):
        os.ftruncate(text.memory.fd, 0)
    assert text.read().decode() == FILE
