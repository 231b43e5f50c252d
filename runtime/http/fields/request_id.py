"""Names of requests: the x-request-id that every answer carries, and the ids that clients give to abort them
by."""

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
    """The x-request-id: the client's, where it is short and printable."""
    for name, value in headers:
        if name == HEADER and 0 < len(value) <= MAX_CHARS and all(0x21 <= char <= 0x7E for char in value):
            return value
    return os.urandom(16).hex().encode()


def telling_id(send: Send, id: bytes, *, also: bytes | None = None) -> Send:
    """`send` that puts the id at the head of the answer, under a second name `also`."""
    told = [(HEADER, id)] if also is None else [(HEADER, id), (also, id)]

    async def with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = message | {"headers": [*message.get("headers", ()), *told]}
        await send(message)

    return with_id
