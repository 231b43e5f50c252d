"""Clients that a server meets when it ends: each does something that stays open."""

import json
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import urlsplit

import h2.config
import h2.connection
import h2.settings
import httpx
from websockets.sync.client import connect

WAIT_S = 60.0
Clients = Callable[[str, ExitStack], None]  # connect to a URL and do something that stays open


def raw(url: str, stack: ExitStack, data: bytes, receive_buffer: int | None = None) -> socket.socket:
    parts = urlsplit(url)
    sock = stack.enter_context(socket.socket())
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect((parts.hostname, parts.port))
    sock.sendall(data)
    return sock


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {length}\r\n\r\n".encode() + body


GRPC = "runtime.v1.Runtime"
GRPC_ENDLESS = b"\x12\x01x\x22\x06\x10\xa0\x8d\x06\x70\x01"  # text, max_new_tokens 100,000, ignore_eos
ENDLESS = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 100_000, "ignore_eos": True}}


def half_heads(url: str, stack: ExitStack) -> None:
    for data in (b"", b"GET / HT", b"POST /generate HTTP/1.1\r\nhost: x\r\n"):
        raw(url, stack, data)


def unfinished_bodies(url: str, stack: ExitStack) -> None:
    for path in ("/generate", "/v1/chat/completions", "/v1/files", "/v1/batches", "/flush_cache", "/nowhere"):
        raw(url, stack, post(path, b'{"text": ', length=10_000_000))


def chunks_without_end(url: str, stack: ExitStack) -> None:
    raw(url, stack, b'POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"te')


def readers_that_never_read(url: str, stack: ExitStack) -> None:
    body = json.dumps(ENDLESS | {"sampling_params": {**ENDLESS["sampling_params"], "n": 8}}).encode()
    for _ in range(4):
        raw(url, stack, post("/generate", body), receive_buffer=2048)
    time.sleep(0.5)


def streams(url: str, stack: ExitStack) -> None:
    for _ in range(4):
        sock = raw(url, stack, post("/generate", json.dumps(ENDLESS).encode()))
        assert sock.recv(10)


def sockets(url: str, stack: ExitStack) -> None:
    stack.enter_context(connect(url.replace("http", "ws") + "/v1/ws", close_timeout=0.1))
    for count in range(3):
        one = stack.enter_context(
            connect(url.replace("http", "ws") + "/v1/ws", close_timeout=0.1, max_queue=1)
        )
        for index in range(8):
            one.send(json.dumps({"id": f"{count}-{index}", "path": "/generate", "body": ENDLESS}))


def pipelines(url: str, stack: ExitStack) -> None:
    raw(url, stack, post("/generate", json.dumps(ENDLESS).encode()) * 50, receive_buffer=2048)


def batches(url: str, stack: ExitStack) -> None:
    body = {"prompt": "x", "model": "pocket", "max_tokens": 100_000, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body})
        for i in range(200)
    ]
    with httpx.Client(base_url=url, timeout=WAIT_S) as http:
        form = {"files": {"file": ("x.jsonl", "\n".join(lines))}, "data": {"purpose": "batch"}}
        file_id = http.post("/v1/files", **form).json()["id"]
        batch = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = http.post("/v1/batches", json=batch).json()["id"]
        deadline = time.monotonic() + WAIT_S
        while http.get(f"/v1/batches/{batch_id}").json()["status"] != "in_progress":
            assert time.monotonic() < deadline
            time.sleep(0.05)


class Http2:
    """A connection of HTTP/2 that sends, and reads nothing."""

    def __init__(self, url: str, stack: ExitStack, window: int = 65_535) -> None:
        self.wire = h2.connection.H2Connection(h2.config.H2Configuration())
        self.wire.local_settings[h2.settings.SettingCodes.INITIAL_WINDOW_SIZE] = window
        self.wire.local_settings.acknowledge()
        self.wire.initiate_connection()
        self.sock = raw(url, stack, self.wire.data_to_send(), receive_buffer=4096)

    def post(self, path: str, body: bytes, *, ends: bool = True, kind: str = "application/json") -> None:
        number = self.wire.get_next_available_stream_id()
        names = {":method": "POST", ":path": path, ":scheme": "http", ":authority": "x", "content-type": kind}
        self.wire.send_headers(number, [*names.items(), ("te", "trailers")])
        self.wire.send_data(number, body, end_stream=ends)
        self.sock.sendall(self.wire.data_to_send())


def http2_idle(url: str, stack: ExitStack) -> None:
    for _ in range(3):
        Http2(url, stack)


def http2_unfinished_bodies(url: str, stack: ExitStack) -> None:
    connection = Http2(url, stack)
    for path in ("/generate", "/v1/chat/completions", "/v1/files", "/v1/batches", "/flush_cache", "/nowhere"):
        connection.post(path, b'{"text": ', ends=False)


def http2_readers_without_a_window(url: str, stack: ExitStack) -> None:
    connection = Http2(url, stack, window=0)
    for _ in range(8):
        connection.post("/generate", json.dumps(ENDLESS).encode())
    time.sleep(0.5)


HTTP2: tuple[Clients, ...] = (http2_idle, http2_unfinished_bodies, http2_readers_without_a_window)


def grpc_frames(message: bytes, length: int | None = None) -> bytes:
    return struct.pack(">BI", 0, len(message) if length is None else length) + message


def grpc_unfinished_messages(url: str, stack: ExitStack) -> None:
    connection = Http2(url, stack)
    for name in ("Generate", "Embed", "Abort", "Health"):
        connection.post(f"/{GRPC}/{name}", grpc_frames(b"x", 10**7), ends=False, kind="application/grpc")


def grpc_readers_without_a_window(url: str, stack: ExitStack) -> None:
    connection = Http2(url, stack, window=0)
    for _ in range(8):
        connection.post(f"/{GRPC}/Generate", grpc_frames(GRPC_ENDLESS), kind="application/grpc")
    time.sleep(0.5)


CLIENTS: tuple[Clients, ...] = (
    half_heads,
    unfinished_bodies,
    chunks_without_end,
    readers_that_never_read,
    streams,
    sockets,
    pipelines,
    batches,
)
