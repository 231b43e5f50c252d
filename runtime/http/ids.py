"""Every answer carries the x-request-id that its request came with, or one of our own: what logs on both sides have in common."""

import os
from collections.abc import Sequence

from starlette.types import Message, Send

HEADER = b"x-request-id"
MAX_CHARS = 128


def request_id(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The client's, where it is short and printable."""
    for name, value in headers:
        if name == HEADER and 0 < len(value) <= MAX_CHARS and all(0x21 <= char <= 0x7e for char in value):
            return value
    return os.urandom(16).hex().encode()


def telling_id(send: Send, id: bytes) -> Send:
    """`send` that puts the id at the head of the answer."""
    async def with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = message | {"headers": [*message.get("headers", ()), (HEADER, id)]}
        await send(message)

    return with_id
