"""A case of the corpus: one request, and what it must get; and what builds bodies of requests."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from tests.hostile.wire import head

USER_KEY, ADMIN_KEY = "hostile-user", "hostile-admin"
OK, BAD = (200,), (400,)
OK_OR_BAD = (200, 400)
CHAT, TEXT, NATIVE, RESPONSES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses"
MESSAGES = "/v1/messages"
CLOUD = "http://169.254.169.254/latest/meta-data/"  # the address of secrets in rented machines
TRAVERSAL = "../../../../../../etc/passwd"
SERVED_NAME = "pocket"
DEEP = 100_000  # levels
FORM = "multipart/form-data; boundary=b"


class Case(Struct, frozen=True):
    """One request, and what it must get."""

    name: str
    path: str
    body: bytes | Callable[[], bytes]  # large bodies are made when they are sent
    status: tuple[int, ...] = BAD
    param: str | None = None  # the field that the error names
    method: str = "POST"
    headers: Mapping[str, str] = {}
    key: str | None = USER_KEY
    needs_model: bool = False  # needs a device with a model: grammars, weights

    def request(self) -> bytes:
        """The bytes of the request."""
        body = self.body if isinstance(self.body, bytes) else self.body()
        key = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        headers = {"content-type": "application/json"} | key | dict(self.headers)
        return (
            head(self.method, self.path, headers, len(body) if body or self.method != "GET" else None) + body
        )


def dump(body: dict[str, Any]) -> bytes:
    """JSON of a body; lone surrogates and numbers that are none are written as they are in Python."""
    return json.dumps(body).encode()


def named(body: dict[str, Any]) -> bytes:
    """JSON of a body that must name its model."""
    return dump({"model": SERVED_NAME} | body)


def chat(**more: Any) -> bytes:
    """A chat of one word, for two tokens."""
    return dump({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **more})


def text(**more: Any) -> bytes:
    """A completion of a text, for two tokens."""
    return dump({"prompt": "Hi", "max_tokens": 2, **more})


def native(**more: Any) -> bytes:
    """A request to /generate, for two tokens."""
    return dump({"text": "Hi", "sampling_params": {"max_new_tokens": 2}, **more})


def sampling(**more: Any) -> bytes:
    """The same with sampling parameters."""
    return native(sampling_params={"max_new_tokens": 2, **more})


def content(part: Any) -> bytes:
    """A chat whose message is one part that is no text."""
    return chat(messages=[{"role": "user", "content": [part]}])


def schema(value: Any) -> bytes:
    """A chat whose answer follows a JSON schema."""
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": value}})


def nested(levels: int, begin: str = "[", middle: str = "", end: str = "]") -> str:
    """JSON of `levels` levels."""
    return begin * levels + middle + end * levels


def inside(body: bytes, value: str) -> bytes:
    """`body` with JSON as the value of its field `"@"`."""
    return body.replace(b'"@"', value.encode())


def with_depth(body: bytes, levels: int) -> bytes:
    """`body` with lists of `levels` levels as the value of its field `"@"`."""
    return inside(body, nested(levels))


def upload(name: str, data: bytes = b"{}", purpose: str = "batch") -> bytes:
    """A form with a file."""
    return (
        f'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--b\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    ).encode() + (data + b"\r\n--b--\r\n")
