"""A loader for tests, and a server of this machine that it may fetch from."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.abc import SocketStream

from runtime.errors import RequestError
from runtime.media.fetch import Fetcher
from runtime.media.loader import MediaLoader
from runtime.media.settings import MediaSettings
from runtime.messages.media import Media, MediaKind, MediaSource
from tests.media.files import image, pixels

HERE = frozenset({"127.0.0.1", "files.test"})
PNG = image("PNG")
PARAM = "messages[0].content[1].image_url"

Answer = Callable[[str, SocketStream], Awaitable[None]]  # of a request for a path


def named(url: str = "", kind: MediaKind = MediaKind.IMAGE, param: str = PARAM, **more: Any) -> MediaSource:
    return MediaSource(kind=kind, param=param, url=url, **more)


@asynccontextmanager
async def loading(
    make: Callable[[frozenset[str]], Fetcher] = Fetcher, **settings: Any
) -> AsyncIterator[MediaLoader]:
    """A loader that may fetch from this machine. Only tests of the limit of time wait for it."""
    one = MediaLoader(
        MediaSettings(**{"domains": HERE, "timeout_s": 60.0} | settings), dict(os.environ), make
    )
    try:
        yield one
    finally:
        await one.aclose()


@asynccontextmanager
async def web(answer: Answer) -> AsyncIterator[str]:
    """The URL of a server whose answers are exactly those bytes."""

    async def serve(stream: SocketStream) -> None:
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                data += await stream.receive()
            try:
                await answer(data.split(b" ")[1].decode(), stream)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # the client has had enough

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, ended() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"


@asynccontextmanager
async def ended() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Tasks that end with the block."""
    async with anyio.create_task_group() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()


def response(
    body: bytes = PNG, status: str = "200 OK", *, length: int | None = None, more: str = ""
) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\ncontent-length: {size}\r\n{more}\r\n".encode() + body


async def png(path: str, stream: SocketStream) -> None:
    await stream.send(response())


async def error(one: MediaLoader, *sources: MediaSource) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await one.load(sources)
    return caught.value


def is_picture(media: Media) -> bool:
    return media.param == PARAM and np.array_equal(media.values[0], pixels())
