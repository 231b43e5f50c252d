"""Ids of requests: the x-request-id header of every answer, and the ids that clients choose to abort
requests."""

import os
from collections.abc import Sequence
from typing import Annotated as A

from msgspec import Meta
from starlette.types import Message, Send

from runtime.errors import InvalidRequest

HEADER = b"x-request-id"
MAX_CHARS = 128

Rid = A[str, Meta(min_length=1, max_length=256)]


def request_ids(rid: str | list[str], count: int) -> list[str]:
    """Ids of `count` prompts: those given, or one with numbers. Raises InvalidRequest."""
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}-{i}" for i in range(count)]
    if len(rid) != count or len(set(rid)) != count:
        raise InvalidRequest(f"rid needs {count} different entries, one for each prompt", param="rid")
    return rid


def request_id(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The x-request-id of the answer: the client's if it is short and printable, else a new one."""
    for name, value in headers:
        if name == HEADER and 0 < len(value) <= MAX_CHARS and all(0x21 <= char <= 0x7E for char in value):
            return value
    return os.urandom(16).hex().encode()


def with_request_id(send: Send, id: bytes, *, also: bytes | None = None) -> Send:
    """A `send` that adds the id to the headers of the answer, also under the name `also`."""
    added = [(HEADER, id)] if also is None else [(HEADER, id), (also, id)]

    async def with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    return with_id
