"""What requests that cost much do to the others: gaps between the tokens of other streams, and the latency of
/health, while the corpus of tests/hostile/costly.py is in flight. Null device, one machine.

    python -m bench.loop_gaps [--seconds 20] [--each] [--at-once N|all] [--tree FOLDER]

The corpus is sent by a process of its own, eight requests at once, again and again; `--at-once all` has all
of it in flight, `--each` measures every case alone instead. `--tree` measures the server of another checkout,
to compare with. `client_late_ms` is how late the timers of the measuring process are itself: what other
programs of the machine do to it is in the gaps as well.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from bench.load import request_bytes
from bench.record import record
from bench.serve import free_port, get
from tests.hostile.attack import AT_ONCE, attack
from tests.hostile.costly import COSTLY

ROOT = Path(__file__).parent.parent
CONTEXT = 32_768
STEP_S = 0.005
STREAMS = 16
LOOK = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEALTH_S = 0.02  # between two looks at /health
OPTIONS = (
    *("--device", "null", "--served-model-name", "pocket", "--null-first-token", "71"),
    *("--json-model-override-args", json.dumps({"max_position_embeddings": CONTEXT})),
    *("--context-length", str(CONTEXT), "--null-step-s", str(STEP_S), "--log-level", "error"),
)
BODY = {"model": "pocket", "prompt": [9, 8, 7, 40], "stream": True, "ignore_eos": True, "max_tokens": 16_000}


class Stream(asyncio.Protocol):
    """One stream after the other on a connection: gaps between reads that have events, in milliseconds."""

    def __init__(self, request: bytes, gaps: list[float]) -> None:
        self.request = request
        self.gaps = gaps
        self.last_s = 0.0
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asks."""
        self.transport = transport
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Stamps a read; asks again at the end of an answer."""
        now = time.perf_counter()
        if self.last_s:
            self.gaps.append((now - self.last_s) * 1e3)
        self.last_s = now
        self.tail = (self.tail + data)[-16:]
        if self.tail.endswith(b"\r\n0\r\n\r\n"):
            self.last_s, self.tail = 0.0, b""
            self.transport.write(self.request)  # type: ignore[attr-defined]


class Health(asyncio.Protocol):
    """Latency of GET /health, in milliseconds, from the moment at which it was due."""

    def __init__(self, latencies: list[float]) -> None:
        self.latencies = latencies
        self.due_s = 0.0
        self.answered = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Stamps the answer."""
        self.latencies.append((time.perf_counter() - self.due_s) * 1e3)
        self.answered.set()

    async def run(self) -> None:
        """Looks every HEALTH_S, later where an answer takes longer."""
        while True:
            self.due_s = time.perf_counter()
            self.answered.clear()
            self.transport.write(LOOK)  # type: ignore[attr-defined]
            await self.answered.wait()
            await asyncio.sleep(HEALTH_S)


async def measure_lateness(late: list[float]) -> None:
    """How late timers of this process are, in milliseconds: that much of the gaps is its own, or the
    machine's."""
    while True:
        due_s = time.perf_counter() + STEP_S
        await asyncio.sleep(STEP_S)
        late.append(max(0.0, time.perf_counter() - due_s) * 1e3)


def figures(values: list[float]) -> dict[str, float]:
    """p50, p99, p99.9 and the largest."""
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * p))], 1) for name, p in at.items()}


async def measure(
    port: int, seconds: float, names: list[str] | None, at_once: str = str(AT_ONCE)
) -> dict[str, Any]:
    """Figures of `seconds` under attack by the cases of these names, so many at once; None: of a quiet
    server."""
    loop = asyncio.get_running_loop()
    gaps: list[float] = []
    latencies: list[float] = []
    late: list[float] = []
    request = request_bytes(port, "/v1/completions", BODY)
    transports = [
        (await loop.create_connection(lambda: Stream(request, gaps), "127.0.0.1", port))[0]
        for _ in range(STREAMS)
    ]
    transport, health = await loop.create_connection(lambda: Health(latencies), "127.0.0.1", port)
    tasks = [asyncio.create_task(health.run()), asyncio.create_task(measure_lateness(late))]
    await asyncio.sleep(1)
    for values in (gaps, latencies, late):
        values.clear()
    attackers = None
    if names is not None:
        attackers = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "bench.loop_gaps",
                "--attack",
                str(port),
                "--seconds",
                str(seconds),
                "--at-once",
                at_once,
                *names,
            ),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        output, _ = await attackers.communicate()
        print(output.decode(), end="", file=sys.stderr)
    else:
        await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    for one in (*transports, transport):
        one.close()
    return {
        "gaps_ms": figures(gaps),
        "health_ms": figures(latencies),
        "client_late_ms": figures(late),
        "tokens": len(gaps),
    }


async def strike(port: int, seconds: float, names: list[str], at_once: str) -> None:
    """Sends the cases again and again for `seconds`, and says once what was answered wrongly."""
    cases = [case for case in COSTLY if case.name in names or not names]
    count = len(cases) if at_once == "all" else int(at_once)
    end, rounds, wrong = time.monotonic() + seconds, 0, set[str]()
    while time.monotonic() < end:
        wrong |= set(await attack(port, cases, at_once=count))
        rounds += 1
    print(f"{len(cases)} cases, {rounds} rounds", *sorted(wrong), sep="\n")


@contextmanager
def server(tree: Path) -> Iterator[int]:
    """The port of a server of `tree`."""
    port = free_port()
    command = [sys.executable, "-m", "runtime", "serve", "--port", str(port), *OPTIONS]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    process = subprocess.Popen(command, cwd=tree, env=environment)
    try:
        while True:
            try:
                if get(port, "/health")[0] == 200:
                    break
            except OSError:
                assert process.poll() is None, "the server ended"
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; all of them by default")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--each", action="store_true", help="every case alone, for one round")
    parser.add_argument(
        "--at-once", default=str(AT_ONCE), metavar="N|all", help="cases that are in flight at the same time"
    )
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack is not None:
        uvloop.run(strike(given.attack, given.seconds, given.names, given.at_once))
        return
    with server(given.tree.resolve()) as port:
        results: dict[str, Any] = {"quiet": uvloop.run(measure(port, 5, None))}
        print("quiet", results["quiet"], flush=True)
        if given.each:
            for case in COSTLY:
                if case.name in given.names or not given.names:
                    results[case.name] = uvloop.run(measure(port, 0.1, [case.name]))
                    print(case.name, results[case.name], flush=True)
        else:
            results["attacked"] = uvloop.run(measure(port, given.seconds, given.names, given.at_once))
            print("attacked", results["attacked"], flush=True)
    if not given.each and given.tree == ROOT:
        record("loop_gaps" if given.at_once == str(AT_ONCE) else "loop_gaps_at_once", results)


if __name__ == "__main__":
    main()
