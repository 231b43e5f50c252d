"""Replicas on a local cluster of Ray, as clients meet them. Skipped where Ray is not installed:
./dev test-ray."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.shape.source import ROOT

pytest.importorskip("ray.serve")

WAIT_S = 180.0  # a cluster and its replicas are some ten processes that import much
NULL = {"device": "null", "null_step_s": 0.02, "standby_ranks": 0, "num_threads": 1}
# how often replicas report what they scale by
OFTEN = {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}


class Cluster:
    """A running cluster, and how to talk to the application on it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def replicas(self) -> set[int]:
        """Process ids of the replicas."""
        return {pid for pid in descendants(self.process.pid) if title(pid).startswith("ray::ServeReplica")}

    def chat(self, max_tokens: int, session: str = "") -> dict[str, Any]:
        """Arguments of httpx for a streamed answer of exactly so many tokens."""
        body = {
            "model": "pocket",
            "messages": [{"role": "user", "content": f"Hello, {session}!"}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"x-session-id": session} if session else {}
        return {"json": body, "headers": headers, "timeout": WAIT_S, "url": f"{self.url}/v1/chat/completions"}

    def tokens(self, max_tokens: int, session: str = "", begun: Callable[[], object] = int) -> int:
        """Streams an answer. -> its tokens; -1: it broke off. `begun` is called at its first event."""
        usage = None
        try:
            with httpx.stream("POST", **self.chat(max_tokens, session)) as answer:
                assert answer.status_code == 200, answer.read()
                for number, line in enumerate(answer.iter_lines()):
                    if number == 0:
                        begun()
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        assert "error" not in event, event
                        usage = event.get("usage") or usage
        except httpx.TransportError:
            return -1
        return -1 if usage is None else int(usage["completion_tokens"])

    def running(self, session: str) -> int:
        """Sequences that run or wait in the replica of a session."""
        answer = httpx.get(f"{self.url}/v1/loads", headers={"x-session-id": session}, timeout=WAIT_S)
        return int(answer.json()["aggregate"]["total_reqs"])

    def wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert self.process.poll() is None, "the cluster has ended"
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.1)


def descendants(pid: int) -> set[int]:
    """All processes below one. Ray's workers are children of its daemon, which is one of the cluster's."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, newest = {pid}, {pid}
    while newest:
        newest = {child for child, parent in parents.items() if parent in newest} - found
        found |= newest
    return found - {pid}


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def environment(**variables: str) -> dict[str, str]:
    """The environment of Ray's processes, which import this package from here."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(paths)}
    # proxies import much as well, on as few cores
    own |= {f"RAY_SERVE_PROXY_{what}_CHECK_TIMEOUT_S": "100" for what in ("READY", "HEALTH")}
    return os.environ | own | variables


@contextmanager
def cluster(arguments: dict[str, Any], machines: int = 1, **variables: str) -> Iterator[Cluster]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.ray_cluster", str(port), json.dumps(arguments), str(machines)],
        cwd=ROOT,
        env=environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        lines = iter(process.stdout)
        assert any(line == "ready\n" for line in lines), "the cluster ended before it was ready"
        threading.Thread(target=lambda: list(lines), daemon=True).start()  # its log is read on
        yield Cluster(process, f"http://127.0.0.1:{port}")
    finally:
        left = descendants(process.pid)
        process.stdin.close()
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()
            for pid in left:
                if "ray" in title(pid) or "rank-" in title(pid):
                    os.kill(pid, signal.SIGKILL)
            process.stdout.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    """Two replicas; a session stays with one of them."""
    with cluster(NULL | {"min_replicas": 2, "routing": "session", "tensor_parallel_size": 2}) as running:
        running.wait(lambda: len(running.replicas()) == 2)
        yield running


def two_sessions(two: Cluster) -> tuple[str, str]:
    """Sessions whose replicas differ: while one of them has a request, the other has none."""
    found: list[str] = []
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(two.tokens, 300, "first", ended.set)
        assert ended.wait(WAIT_S)
        assert two.running("first") == 1
        found = [name for name in (f"session-{i}" for i in range(20)) if two.running(name) == 0]
        assert two.running("first") == 1, "it ran all the time"
        assert first.result() == 300
    assert 0 < len(found) < 20
    return "first", found[0]


def test_the_whole_api_is_there_and_answers_stream(two: Cluster) -> None:
    assert httpx.get(f"{two.url}/health", timeout=WAIT_S).json()["state"] == "ready"
    assert httpx.get(f"{two.url}/v1/models", timeout=WAIT_S).json()["data"][0]["id"] == "pocket"
    with httpx.stream("POST", **two.chat(100)) as answer:
        times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
    assert len(times) > 50, "events come one by one, and not as one piece"
    refused = httpx.post(f"{two.url}/v1/completions", json={"prompt": "x", "max_tokens": -1}, timeout=WAIT_S)
    assert refused.status_code == 400 and "max_tokens" in refused.json()["error"]["message"]


def test_ranks_are_processes_of_their_replica(two: Cluster) -> None:
    for replica in two.replicas():
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in descendants(replica)]
        assert sum(name.startswith("rank-") for name in names) == 2


def test_a_session_meets_its_cached_prefix(two: Cluster) -> None:
    """Its second request finds the prompt of the first, in whichever of the two replicas that is."""
    for session in ("a", "b", "c", "d"):
        body = {"prompt": session * 200, "max_tokens": 1, "model": "pocket"}
        cached = []
        for _ in range(2):
            answer = httpx.post(
                f"{two.url}/v1/completions", json=body, headers={"x-session-id": session}, timeout=WAIT_S
            ).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0 and cached[1] > 50


def test_a_client_that_leaves_ends_its_request(two: Cluster) -> None:
    with httpx.stream("POST", **two.chat(1500, "leaver")) as answer:
        lines = answer.iter_lines()  # when this object goes, the stream is closed
        next(lines)
        assert two.running("leaver") == 1
    two.wait(lambda: two.running("leaver") == 0)


def test_streams_go_on_when_the_other_replica_is_killed(two: Cluster) -> None:
    """The streams of the killed one break off, the others have all their tokens, new requests are answered
    meanwhile, and Ray starts another replica. No rank of the killed one is left."""
    sessions = two_sessions(two)
    before = two.replicas()
    barrier = threading.Barrier(7)
    with ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(two.tokens, 500, name, barrier.wait) for name in sessions for _ in range(3)]
        barrier.wait(WAIT_S)  # each has begun
        victim = min(before)
        ranks = descendants(victim)
        assert ranks
        os.kill(victim, signal.SIGKILL)
        results = [stream.result() for stream in streams]
    assert {tuple(results[:3]), tuple(results[3:])} == {(-1, -1, -1), (500, 500, 500)}
    two.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert [two.tokens(5, name) for name in sessions] == [5, 5]
    two.wait(lambda: len(two.replicas() - {victim}) == 2)
    two.wait(lambda: len({two.running(name) for name in sessions}) == 1)  # both answer


def test_replicas_come_with_demand_and_drain_when_they_go() -> None:
    """More sequences than one replica can run bring a second one; when demand falls, one of the two goes, and
    the streams that it has end first, with all their tokens."""
    arguments = NULL | {
        "max_replicas": 2,
        "max_running_requests": 16,
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
        "look_back_period_s": 11,
        "shutdown_timeout": 120,
    }
    with cluster(arguments, **OFTEN) as scaled:
        assert len(scaled.replicas()) == 1
        with ThreadPoolExecutor(32) as pool:
            crowd = [pool.submit(scaled.tokens, 900) for _ in range(32)]
            scaled.wait(lambda: len(scaled.replicas()) == 2)
            assert [one.result() for one in crowd] == [900] * 32
        both = scaled.replicas()
        barrier = threading.Barrier(7)
        with ThreadPoolExecutor(6) as pool:
            few = [pool.submit(scaled.tokens, 1800, "", barrier.wait) for _ in range(6)]
            barrier.wait(WAIT_S)
            assert [one.result() for one in few] == [1800] * 6
        scaled.wait(lambda: len(scaled.replicas()) == 1)
        assert scaled.replicas() < both
        assert scaled.tokens(5) == 5


def test_a_replica_of_two_machines_outlives_the_loss_of_one() -> None:
    """A rank on each of two daemons; the actor of the second one is killed, and started again."""
    with cluster(NULL | {"nnodes": 2, "tensor_parallel_size": 2, "dist_timeout": 120}, 2) as running:

        def nodes() -> set[int]:
            return {pid for pid in descendants(running.process.pid) if title(pid).startswith("ray::RayNode")}

        assert len(running.replicas()) == len(nodes()) == 1
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(running.tokens, 200, "", begun.set)
            assert begun.wait(WAIT_S)
            (killed,) = nodes()
            os.kill(killed, signal.SIGKILL)
            assert answer.result() == 200
        assert nodes() and killed not in nodes()


def test_the_line_of_the_docs(tmp_path: Path) -> None:
    """`serve run` takes the application, and shows every argument that cannot work."""
    code = "from ray.serve.scripts import cli; cli()"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "runtime.ray:app", "modle_path=x"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode != 0
    assert re.search(r"OptionsError: .*modle_path", done.stderr, re.DOTALL)
