"""A client of raw bytes: what it sends is never mended, and what it reads is one whole answer."""

import asyncio
import http.client
import io
import json
from typing import Any

from msgspec import Struct

TIMEOUT_S = 60.0


class Reply(Struct, frozen=True):
    """One answer."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error of the body, in the one form for the APIs of OpenAI, Anthropic and Ollama; raises
        ValueError or KeyError for a body that has none."""
        error = json.loads(self.body)["error"]
        return error if isinstance(error, dict) else {"message": error}


class _Bytes:
    """What http.client takes for a socket."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.data)


def parse(data: bytes, method: str) -> Reply:
    """Reads an answer of HTTP/1.1; interim ones before it are left out. Raises http.client.HTTPException, or
    IncompleteRead for an answer that ends early."""
    response = http.client.HTTPResponse(_Bytes(data), method=method)  # type: ignore[arg-type]
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Reply(response.status, headers, response.read())


def head(method: str, target: str, headers: dict[str, str], length: int | None) -> bytes:
    """The head of a request whose answer ends the connection. Characters are sent as latin-1 or, where they
    are none, as UTF-8."""
    lines = [f"{method} {target} HTTP/1.1"]
    lines += [
        f"{name}: {value}" for name, value in ({"host": "localhost", "connection": "close"} | headers).items()
    ]
    if length is not None and "content-length" not in headers and "transfer-encoding" not in headers:
        lines.append(f"content-length: {length}")
    text = "\r\n".join([*lines, "", ""])
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


async def exchange(port: int, request: bytes, method: str = "POST", timeout_s: float = TIMEOUT_S) -> Reply:
    """Sends `request` and reads to the end of the connection. Raises TimeoutError for a hang, and
    ConnectionError or http.client.HTTPException for an answer that is none."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        try:
            data = bytearray()

            async def write() -> None:
                # an answer may come, and the connection end, before all is sent
                try:
                    writer.write(request)
                    await writer.drain()
                except (ConnectionResetError, BrokenPipeError):
                    pass

            async def read() -> None:
                try:
                    while more := await reader.read(2**18):
                        data.extend(more)
                except ConnectionResetError:
                    if not data:
                        raise

            await asyncio.gather(write(), read())
            return parse(bytes(data), method)
        finally:
            writer.transport.abort()
