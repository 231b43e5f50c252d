"""The end of the server, whatever its clients do: after SIGTERM within --shutdown-timeout, after a second
signal at once, and at any moment of the start. No rank is left.

Times have a wide margin (MARGIN_S): what must not happen takes 30 s or does not end.
"""

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import h2.config
import h2.connection
import h2.settings
import httpx
import pytest
from websockets.sync.client import connect

from runtime import shutdown
from runtime.errors import ModelError
from runtime.models.config.model_config import read_config

TIMEOUT_S = 1.0  # --shutdown-timeout
MARGIN_S = 12.0
WAIT_S = 60.0
POCKET = Path(__file__).parents[2] / "runtime/pocket"
NULL = ("--device", "null", "--num-threads", "1", "--null-step-s", "0.002")


def children(pid: int) -> list[int]:
    """Processes that it started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Process:
    """`runtime serve`, and what it wrote."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "runtime", "serve", "--port", "0", "--log-format", "json", *options]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file, stdin=subprocess.DEVNULL)
        self.url = ""

    def wait_for(self, event: str) -> None:
        """Returns when the log has a line of this event."""
        deadline = time.monotonic() + WAIT_S
        while not (line := self.line(event)):
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, self.log.read_text()[-2000:]
            time.sleep(0.02)
        self.url = json.loads(line).get("url", self.url)

    def line(self, event: str) -> str:
        lines = self.log.read_text().splitlines()
        return next((line for line in lines if f'"event": "{event}"' in line), "")

    def ends(self, *signals: int, pause_s: float = 0.3) -> float:
        """Sends the signals, one after the other. -> seconds from the last one to the end. No child is
        left."""
        left = children(self.process.pid)
        begin = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            begin = time.monotonic()
            if number is not signals[-1] or signals.count(number) > 1:
                time.sleep(pause_s)
        self.process.wait(WAIT_S)
        took = time.monotonic() - begin
        deadline = time.monotonic() + WAIT_S
        while any(map(is_alive, left)):
            assert time.monotonic() < deadline, "a child lives on"
            time.sleep(0.02)
        return took


@contextmanager
def started(tmp_path: Path, *options: str) -> Iterator[Process]:
    """A server on its way."""
    process = Process(tmp_path / "log", *options)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


@contextmanager
def serving(tmp_path: Path, *options: str) -> Iterator[Process]:
    """A server that is ready."""
    with started(tmp_path, *NULL, "--shutdown-timeout", str(TIMEOUT_S), *options) as process:
        process.wait_for("listening")
        process.wait_for("ready")
        yield process


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


def test_the_end_comes_in_time_with_every_kind_of_client(tmp_path: Path) -> None:
    options = ("--file-storage-path", str(tmp_path / "store"), "--enable-h2c")
    with serving(tmp_path, *options) as server, ExitStack() as stack:
        for client in (*CLIENTS, *HTTP2):
            client(server.url, stack)
        assert server.ends(signal.SIGTERM) < TIMEOUT_S + MARGIN_S
        assert server.process.returncode == 0, server.log.read_text()[-3000:]


@pytest.mark.full
@pytest.mark.parametrize("client", (*CLIENTS, *HTTP2))
@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGINT)])
def test_the_end_comes_in_time(tmp_path: Path, client: Clients, signals: tuple[int, ...]) -> None:
    options = ("--file-storage-path", str(tmp_path / "store"), "--enable-h2c")
    with serving(tmp_path, *options) as server, ExitStack() as stack:
        client(server.url, stack)
        assert server.ends(*signals) < TIMEOUT_S + MARGIN_S
        # a second signal may meet a process that has ended all it had, and is leaving
        codes = (0, -signals[-1]) if len(signals) > 1 else (0,)
        assert server.process.returncode in codes, server.log.read_text()[-3000:]


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, "--shutdown-timeout", "600") as server, ExitStack() as stack:
        for client in (unfinished_bodies, streams, readers_that_never_read, sockets):
            client(server.url, stack)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        assert server.ends(signal.SIGTERM) < MARGIN_S
        assert server.process.returncode == 0, server.log.read_text()[-3000:]


UNFINISHED = (unfinished_bodies, http2_unfinished_bodies)  # no request runs: draining is over at once


@pytest.mark.parametrize("clients", [UNFINISHED, HTTP2], ids=["unfinished bodies", "http2"])
def test_a_second_signal_ends_connections_at_once(tmp_path: Path, clients: tuple[Clients, ...]) -> None:
    """In order, not by force: with exit code 0 and before FORCE_S."""
    with serving(tmp_path, "--shutdown-timeout", "600", "--enable-h2c") as server, ExitStack() as stack:
        for client in clients:
            client(server.url, stack)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        time.sleep(0.5)
        assert server.process.poll() is None
        assert server.ends(signal.SIGTERM) < MARGIN_S
        assert server.process.returncode == 0, server.log.read_text()[-3000:]


@pytest.mark.parametrize("seconds", [TIMEOUT_S, 600.0], ids=["deadline", "second signal"])
def test_grpc_ends_in_time(tmp_path: Path, seconds: float) -> None:
    options = ("--grpc-mode", "--shutdown-timeout", str(seconds))
    with serving(tmp_path, *options) as server, ExitStack() as stack:
        for client in (http2_idle, grpc_unfinished_messages, grpc_readers_without_a_window):
            client(server.url.replace("grpc", "http"), stack)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        assert server.ends(*(() if seconds == TIMEOUT_S else (signal.SIGTERM,))) < TIMEOUT_S + MARGIN_S
        assert server.process.returncode == 0, server.log.read_text()[-3000:]


def test_a_rank_that_hangs_does_not_delay_the_end(tmp_path: Path) -> None:
    with serving(tmp_path, "--watchdog-timeout", "0") as server, ExitStack() as stack:
        streams(server.url, stack)
        for rank in children(server.process.pid):
            os.kill(rank, signal.SIGSTOP)
        assert server.ends(signal.SIGTERM) < TIMEOUT_S + MARGIN_S
        assert server.process.returncode == 0, server.log.read_text()[-3000:]


# ── while it starts ────────────────────────────────────────────────────────────


def model(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    folder = tmp_path / "model"
    shutil.copytree(POCKET, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


def fifo(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_fifo_in_place_of_a_model_file_is_refused(tmp_path: Path, name: str) -> None:
    fifo((folder := model(tmp_path)) / name)
    done = start_fails(tmp_path, "--model-path", str(folder), "--device", "cpu")
    assert name in done, done


@pytest.mark.parametrize("option", ["--chat-template", "--config", "--api-key-file", "--model-checksum"])
def test_a_fifo_in_place_of_an_option_s_file_is_refused(tmp_path: Path, option: str) -> None:
    done = start_fails(tmp_path, "--device", "null", option, str(fifo(tmp_path / "x.yaml")))
    assert option in done and "FIFO" in done, done


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [10**9, -1, 10**30])
def test_a_config_of_an_absurd_size_is_refused(tmp_path: Path, field: str, value: int) -> None:
    config = json.loads((POCKET / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=field):
        read_config(tmp_path)


def test_a_template_that_makes_too_much_does_not_hold_up_the_start(tmp_path: Path) -> None:
    (template := tmp_path / "x.jinja").write_text("{{ '%1000000000d' % 1 }}")
    with serving(tmp_path, "--chat-template", str(template)) as server:
        body = {"model": "pocket", "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S)
        assert answer.status_code == 400 and "width" in answer.json()["error"]["message"]


def start_fails(tmp_path: Path, *options: str) -> str:
    """What a server says that ends because it cannot start."""
    with started(tmp_path, *options) as process:
        assert process.process.wait(WAIT_S) == 2
        return process.log.read_text()


def stopped_rank(process: Process) -> None:
    """The rank neither gets on with loading nor handles signals."""
    process.wait_for("listening")
    deadline = time.monotonic() + WAIT_S
    while not (ranks := children(process.process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)


def reads_slowly(process: Process) -> None:
    """It has begun: Python is up, and reads what it was asked to."""
    deadline = time.monotonic() + WAIT_S
    while b"runtime" not in Path(f"/proc/{process.process.pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
    time.sleep(0.2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("until", [stopped_rank, reads_slowly])
def test_a_signal_ends_the_start_at_any_moment(
    tmp_path: Path, until: Callable[[Process], None], number: int
) -> None:
    with started(tmp_path, "--device", "cpu", "--shutdown-timeout", "600") as process:
        until(process)
        assert process.ends(number) < MARGIN_S
        assert process.process.returncode in (-number, 130), process.log.read_text()[-2000:]


def test_the_first_process_of_a_container_ends_too() -> None:
    code = "import os, signal; from runtime import shutdown; os.getpid = lambda: 1; "
    code += (
        "shutdown.end_at_once_on_signals(); os.kill(os.getppid() and {pid}, signal.SIGTERM); signal.pause()"
    )
    code = code.replace("{pid}", "int(open('/proc/self/stat').read().split()[0])")
    assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_S).returncode == 128 + signal.SIGTERM


def test_what_hangs_is_ended_by_force() -> None:
    code = "import time; from runtime import shutdown; shutdown.end_by_force(0.2); time.sleep(600)"
    done = subprocess.run([sys.executable, "-c", code], timeout=WAIT_S, capture_output=True, text=True)
    assert done.returncode == shutdown.FORCED and "most recent call first" in done.stderr
