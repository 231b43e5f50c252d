"""The end of the server, whatever its clients do: after SIGTERM within --shutdown-timeout, after a second
signal at once, and at any moment of the start. No rank is left.

Times have a wide margin (MARGIN_S): what must not happen takes 30 s or does not end.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from runtime import shutdown
from runtime.errors import ModelError
from runtime.models.config.model_config import read_config
from tests.hostile.lingering_clients import (
    CLIENTS,
    HTTP2,
    Clients,
    grpc_readers_without_a_window,
    grpc_unfinished_messages,
    http2_idle,
    http2_unfinished_bodies,
    readers_that_never_read,
    sockets,
    streams,
    unfinished_bodies,
)

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


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


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
    """The rank neither gets on with loading nor handles signals. One that is stopped before the kernel knows
    whom it is to end with lives until it goes on: so this waits for its name, which is set after that."""
    process.wait_for("listening")
    deadline = time.monotonic() + WAIT_S
    while not (ranks := children(process.process.pid)) or "python" in "".join(map(name_of, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)


def has_begun(process: Process) -> None:
    """Python is up, and imports what it was asked to: Ctrl-C is no longer an exception of its own. Before it
    has a handler for that there is none either, for a moment, so this looks twice."""
    deadline = time.monotonic() + WAIT_S
    seen = 0
    while seen < 2:
        assert time.monotonic() < deadline
        is_python = signal.SIGPIPE in signals_of(process, "SigIgn")
        seen = seen + 1 if is_python and signal.SIGINT not in signals_of(process, "SigCgt") else 0
        time.sleep(0.1)


def signals_of(process: Process, kind: str) -> set[int]:
    """The signals that the process ignores (SigIgn) or has handlers for (SigCgt), see proc(5)."""
    lines = Path(f"/proc/{process.process.pid}/status").read_text().splitlines()
    bits = int(next(line for line in lines if line.startswith(kind)).split()[1], 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("until", [stopped_rank, has_begun])
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
