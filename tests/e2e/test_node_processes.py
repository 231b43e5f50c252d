"""Two nodes as processes, in network namespaces of their own where this machine allows: how they end, and
what their ends mean for the other and for requests."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.node_of import SECRET, free_port

PATIENCE_S = 90.0  # only a failing test waits for so long
COUNT = 400  # tokens of a request
NAMESPACE = "runtime-nodes"
LINK = (("rtn0", "10.213.71.1"), ("rtn1", "10.213.71.2"))


def ip(words: str) -> bool:
    return subprocess.run(["ip", *words.split()], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[str, list[str]]]:
    """The address of node 0 for node 1, and the words before a command that run it as node 1: in a namespace
    that only a pair of virtual interfaces connects, else on another loopback address."""
    (here, here_address), (there, there_address) = LINK
    inside = f"netns exec {NAMESPACE} ip"
    words = (
        f"netns add {NAMESPACE}",
        f"link add {here} type veth peer name {there} netns {NAMESPACE}",
        f"addr add {here_address}/24 dev {here}",
        f"link set {here} up",
        f"{inside} addr add {there_address}/24 dev {there}",
        f"{inside} link set {there} up",
        f"{inside} link set lo up",
    )
    if os.geteuid() == 0 and shutil.which("ip") is not None and all(map(ip, words)):
        yield here_address, ["ip", "netns", "exec", NAMESPACE]
    else:
        yield "127.0.0.2", []
    ip(f"link del {here}")
    ip(f"netns del {NAMESPACE}")


class Servers:
    """Processes of nodes, with their logs."""

    def __init__(
        self, folder: Path, host: tuple[str, list[str]], *options: str, sizes: tuple[str, ...] = ("--tp", "2")
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self._words = host[1]
        self._running: list[subprocess.Popen[bytes]] = []
        secret = folder / "secret"
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        self._options = [
            *("--device", "null", "--null-step-s", "0.005", *sizes, "--nnodes", "2"),
            *("--dist-init-addr", f"{host[0]}:{free_port(host[0])}", "--dist-secret-file", str(secret)),
            *("--log-format", "json", "--context-length", "2048", *options),
        ]

    def start(self, node: int) -> subprocess.Popen[bytes]:
        """Starts a node."""
        own = ("--port", str(self.port)) if node == 0 else ("--node-rank", str(node))
        command = [sys.executable, "-m", "runtime", "serve", *self._options, *own]
        with (self.folder / f"log{node}").open("ab") as log:
            process = subprocess.Popen([*(self._words if node else ()), *command], stderr=log, stdout=log)
        self._running.append(process)
        return process

    def log(self, node: int) -> str:
        return (self.folder / f"log{node}").read_text()

    def state(self) -> tuple[str, str]:
        """The state in /health of node 0, and more about it; empty: it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                found = json.load(reply)
        except urllib.error.HTTPError as error:
            found = json.load(error)
        except OSError:
            return "", ""
        return str(found["state"]), str(found.get("detail", ""))

    def until(self, state: str, detail: str = "") -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.state())[0] != state or (detail or state == "ready") and found[1] != detail:
            assert time.monotonic() < deadline, self.log(0) + self.log(1)
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


@pytest.fixture
def servers(tmp_path: Path, host: tuple[str, list[str]]) -> Iterator[Servers]:
    running = Servers(tmp_path, host, "--dist-timeout", "60")
    yield running
    running.close()


class Requests:
    """Streams that run while something happens to a node."""

    def __init__(self, port: int) -> None:
        self.num_events = 0
        self.found: list[list[int]] = [[] for _ in range(4)]
        self.threads = [threading.Thread(target=self._ask, args=(port, i)) for i in range(4)]
        for thread in self.threads:
            thread.start()

    def _ask(self, port: int, i: int) -> None:
        params = {"max_new_tokens": COUNT, "ignore_eos": True, "sampling_seed": i}
        body = {"input_ids": [1, 2, 3], "sampling_params": params, "stream": True}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    self.found[i] = json.loads(line[6:])["output_ids"]
                    self.num_events += 1

    def check(self) -> None:
        """All streams have all their tokens."""
        for thread in self.threads:
            thread.join(PATIENCE_S)
        for i, found in enumerate(self.found):
            assert found == [97 + (i + 3 + n) % 26 for n in range(COUNT)]


def test_a_node_that_is_killed_and_comes_back_breaks_no_stream(servers: Servers) -> None:
    first, second = servers.start(0), servers.start(1)
    servers.until("ready")
    requests = Requests(servers.port)
    while requests.num_events < 40:
        time.sleep(0.01)
    second.send_signal(signal.SIGKILL)
    servers.until("recovering")
    second = servers.start(1)
    requests.check()
    servers.until("ready")
    assert "a node is gone" in servers.log(0) and '"waits_s":60.0' in servers.log(0).replace(" ", "")
    first.send_signal(signal.SIGINT)
    assert first.wait(PATIENCE_S) == 0
    assert second.wait(PATIENCE_S) == 0, "node 0 has told it to end"


def test_streams_of_a_killed_node_go_on_with_the_replica_of_another(
    tmp_path: Path, host: tuple[str, list[str]]
) -> None:
    sizes = ("--dp", "2", "--load-balance-method", "round_robin")
    servers = Servers(tmp_path, host, "--dist-timeout", "60", sizes=sizes)
    try:
        first, second = servers.start(0), servers.start(1)
        servers.until("ready")
        requests = Requests(servers.port)
        deadline = time.monotonic() + PATIENCE_S
        while requests.num_events < 40:
            assert time.monotonic() < deadline, servers.log(0)
            time.sleep(0.01)
        second.send_signal(signal.SIGKILL)
        servers.until("ready", "1 of 2 replicas are recovering")
        requests.check()
        second = servers.start(1)
        servers.until("ready")
        again = Requests(servers.port)
        again.check()
        first.send_signal(signal.SIGINT)
        assert first.wait(PATIENCE_S) == 0 and second.wait(PATIENCE_S) == 0
        assert "requests go on with other replicas" in servers.log(0)
        assert "Traceback" not in servers.log(0) + servers.log(1)
    finally:
        servers.close()


def test_a_node_that_is_interrupted_ends_cleanly_and_node_0_waits(servers: Servers) -> None:
    first, second = servers.start(0), servers.start(1)
    servers.until("ready")
    second.send_signal(signal.SIGINT)
    assert second.wait(PATIENCE_S) == 0
    servers.until("recovering")
    assert "it was ended" in servers.log(0) and "Traceback" not in servers.log(0) + servers.log(1)
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE_S) == 0


def test_each_ends_when_the_other_does_not_come_back(tmp_path: Path, host: tuple[str, list[str]]) -> None:
    """Two pairs of nodes at the same time: each pair waits for the whole of --dist-timeout."""
    pairs: list[Servers] = []
    try:
        for killed in (0, 1):
            folder = tmp_path / str(killed)
            folder.mkdir()
            pairs.append(Servers(folder, host, "--dist-timeout", "10"))
        processes = [[servers.start(0), servers.start(1)] for servers in pairs]
        for killed, servers in enumerate(pairs):
            servers.until("ready")
            processes[killed][killed].send_signal(signal.SIGKILL)
        for killed, servers in enumerate(pairs):
            assert processes[killed][1 - killed].wait(PATIENCE_S) == 1
            log = servers.log(1 - killed)
            assert re.search("did not come within --dist-timeout 10 s", log) and "Traceback" not in log
    finally:
        for servers in pairs:
            servers.close()


def test_a_refused_node_names_the_difference_and_ends_with_2(
    tmp_path: Path, host: tuple[str, list[str]]
) -> None:
    servers = Servers(tmp_path, host, "--dist-timeout", "60")
    try:
        servers.start(0)
        deadline = time.monotonic() + PATIENCE_S
        while "node 0 waits" not in servers.log(0):
            assert time.monotonic() < deadline, servers.log(0)
            time.sleep(0.02)
        servers._options += ["--page-size", "64"]
        assert servers.start(1).wait(PATIENCE_S) == 2
        assert "--page-size is not given on node 0, and 64 there" in servers.log(1)
        assert "--page-size is not given on node 0, and 64 there" in servers.log(0)
    finally:
        servers.close()


def test_a_node_has_a_health_of_its_own(servers: Servers) -> None:
    port = free_port()
    servers._words = []  # in the namespace of this test, so that it can ask
    servers._options += ["--port", str(port)]
    servers.start(1)
    deadline = time.monotonic() + PATIENCE_S
    seen: set[tuple[int, str]] = set()
    has_node_0 = False
    while (200, "ready") not in seen:
        assert time.monotonic() < deadline, (seen, servers.log(1))
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                seen.add((reply.status, json.load(reply)["status"]))
        except urllib.error.HTTPError as error:
            seen.add((error.code, json.load(error)["status"]))
            if not has_node_0:
                has_node_0 = True
                servers.start(0)
        except OSError:
            time.sleep(0.02)
    assert seen == {(503, "loading"), (200, "ready")}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5)
