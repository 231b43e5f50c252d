"""A closed-loop streaming client for benches: keeps `streams` requests in flight, stamps every event, and
decodes nothing while it measures.

Raw sockets on purpose: the client shares two cores with what it measures.
"""

import asyncio
import json
import os
import time
from pathlib import Path

import uvloop
from msgspec import Struct

HZ = os.sysconf("SC_CLK_TCK")


class Run(Struct):
    """Figures of one run of the client."""

    streams: int
    requests: int
    tokens: int
    wall_s: float
    server_cpu_s: float
    client_cpu_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]

    @property
    def figures(self) -> dict[str, object]:
        """The figures for bench/results."""
        return {
            "streams": self.streams,
            "requests": self.requests,
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / self.wall_s),
            "server_cpu_us_per_token": round(self.server_cpu_s / self.tokens * 1e6, 2),
            "client_cpu_us_per_token": round(self.client_cpu_s / self.tokens * 1e6, 2),
            "ttft_ms": self.ttft_ms,
            "itl_ms": self.itl_ms,
        }


class Reads:
    """The reads of one answer: the time and number of events of each."""

    def __init__(self, begin: float) -> None:
        self.begin = begin
        self.at: list[tuple[float, int]] = []


class Client(asyncio.Protocol):
    """One connection, kept alive: one request after the other."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Reads] | None = None
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self.transport = transport

    def ask(self, request: bytes) -> "asyncio.Future[Reads]":
        """Sends a request; the future has its reads when the answer is complete."""
        self.reads = Reads(time.perf_counter())
        self.tail = b""
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)  # type: ignore[attr-defined]
        return self.done

    def data_received(self, data: bytes) -> None:
        """Stamps the events of a read, and completes the request at the last chunk."""
        self.reads.at.append((time.perf_counter(), data.count(b"data: ")))
        self.tail = (self.tail + data)[-32:]
        if self.tail.endswith(b"\r\n0\r\n\r\n") and self.done is not None:
            self.done.set_result(self.reads)

    def connection_lost(self, error: Exception | None) -> None:
        """Fails the open request, if there is one."""
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError(f"stream ended early: ... {self.tail!r}"))


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process and all its descendants (proc(5))."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
    total, todo = 0, [pid]
    while todo:
        this = todo.pop()
        total += ticks.get(this, 0)
        todo += children.get(this, [])
    return total / HZ


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds."""
    ordered = sorted(values)
    return (
        {
            f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3, 3)
            for p in (50, 90, 99)
        }
        if ordered
        else {}
    )


def request_bytes(port: int, path: str, body: dict[str, object]) -> bytes:
    """An HTTP/1.1 POST of JSON, as bytes."""
    payload = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\n\r\n"
    ).encode() + payload


async def _drive(port: int, streams: int, bodies: list[tuple[str, dict[str, object]]]) -> list[Reads]:
    loop = asyncio.get_running_loop()
    todo = iter([request_bytes(port, path, body) for path, body in bodies])
    finished: list[Reads] = []

    async def worker() -> None:
        transport, client = await loop.create_connection(Client, "127.0.0.1", port)
        for request in todo:
            finished.append(await client.ask(request))
        transport.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(worker())
    return finished


def run(
    port: int, server_pid: int, *, streams: int, bodies: list[tuple[str, dict[str, object]]], tokens_each: int
) -> Run:
    """Sends `bodies` with `streams` in flight. Every answer has `tokens_each` tokens."""
    cpu, own, begin = tree_cpu_s(server_pid), time.process_time(), time.perf_counter()
    finished = uvloop.run(_drive(port, streams, bodies))
    wall, own = time.perf_counter() - begin, time.process_time() - own
    cpu = tree_cpu_s(server_pid) - cpu
    gaps: list[float] = []
    first: list[float] = []
    for reads in finished:
        events = [(at, n) for at, n in reads.at if n]
        first.append(events[0][0] - reads.begin)
        for (before, _), (at, n) in zip(events, events[1:], strict=False):
            gaps += [(at - before) / n] * n
    return Run(
        streams,
        len(finished),
        tokens_each * len(finished),
        wall,
        cpu,
        own,
        percentiles(first),
        percentiles(gaps),
    )
