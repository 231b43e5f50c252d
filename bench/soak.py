"""Memory over time: 10,000 short requests, a third of them left half way, on the null device; bounded in
count and time.

    python -m bench.soak [--requests 10000]
    python -m bench.soak --tiers [--device cpu] [--seconds 180] [--kills 6]

Prints resident memory of all server processes every tenth of the way, and at the end what the server
reports as still in use.

With --tiers, for --seconds: prompts that share prefixes, pools that are too small for them, host memory and
file tiers, clients that leave, ranks that are killed. No page may leak, and a repeated prompt must get the
same answer (with --device cpu from the embedded model, in float32).
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import uvloop

from bench.load import request_bytes
from bench.record import record
from bench.recovery import rank_pids
from bench.serve import get, server

STREAMS = 64
LIMIT_S = 600


async def one(port: int, request: bytes, leaves: bool) -> str:
    """The text of the answer; empty for a client that leaves half way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if leaves:
            await reader.read(random.randint(1, 2000))
            return ""
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            more = await reader.read(65536)
            if not more:
                raise ConnectionError(f"an answer ended early: ... {data[-200:]!r}")
            data += more
        return "".join(
            json.loads(f'"{text}"') for text in re.findall(r'"text":"((?:[^"\\]|\\.)*)"', data.decode())
        )
    finally:
        writer.close()


async def drive(port: int, count: int, base: int) -> None:
    """Sends `count` requests over all streams; a third of them is left half way."""
    todo = iter(range(count))

    async def worker() -> None:
        for i in todo:
            body = {
                "model": "null",
                "prompt": [(base + i + k) % 2000 for k in range(24)],
                "max_tokens": 24,
                "stream": True,
                "ignore_eos": True,
            }
            await one(port, request_bytes(port, "/v1/completions", body), leaves=i % 3 == 0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS):
            tasks.create_task(worker())


class Tiers:
    """Clients of the tiers: their prompts, and the first answer to each."""

    def __init__(self, port: int, num_streams: int) -> None:
        self.port = port
        self.num_streams = num_streams
        self.random = random.Random(0)
        self.answers: dict[tuple[int, ...], str] = {}
        self.counts = {"requests": 0, "left": 0, "repeated": 0, "changed": 0}

    def prompt(self) -> list[int]:
        """One of 40 prefixes, the first ones often, and one of four ends."""
        prefix = min(int(self.random.paretovariate(0.7)), 40)
        return [
            *((prefix * k + k // 7) % 90 for k in range(64 + 4 * prefix)),
            prefix,
            *[self.random.randrange(4)] * 9,
        ]

    async def drive(self, until: float) -> None:
        """Sends requests over all streams until a time."""

        async def worker() -> None:
            while time.perf_counter() < until:
                prompt, leaves = self.prompt(), self.random.random() < 0.3
                body = {
                    "model": "soak",
                    "prompt": prompt,
                    "max_tokens": 16,
                    "stream": True,
                    "ignore_eos": True,
                    "temperature": 0,
                    "seed": 0,
                }
                self.note(
                    tuple(prompt),
                    await one(self.port, request_bytes(self.port, "/v1/completions", body), leaves),
                    leaves,
                )

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.num_streams):
                tasks.create_task(worker())

    def note(self, prompt: tuple[int, ...], text: str, leaves: bool) -> None:
        """Counts a request and compares its answer with the earlier one to the same prompt."""
        self.counts["requests"] += 1
        if leaves:
            self.counts["left"] += 1
        elif prompt in self.answers:
            self.counts["repeated"] += 1
            if text != self.answers[prompt]:
                self.counts["changed"] += 1
                print("a different answer:", prompt, repr(self.answers[prompt]), repr(text), flush=True)
        else:
            self.answers[prompt] = text


METRICS = (
    "rank_restarts_total",
    "cache_leaks_total",
    "failed_requests_total",
    "host_loaded_tokens_total",
    "host_saved_pages_total",
    "storage_fetched_tokens_total",
    "preemptions_total",
)


def metrics(port: int) -> dict[str, int]:
    """Counters of /metrics by name, those that the server has."""
    text = get(port, "/metrics")[1].decode()
    values = dict(re.findall(r"^runtime_(\w+) (\S+)$", text, re.MULTILINE))
    return {name: int(float(values[name])) for name in METRICS if name in values}


def resident(port: int) -> dict[str, float]:
    """MiB of each server process, from /metrics."""
    text = get(port, "/metrics")[1].decode()
    return {
        name: round(float(value) / 2**20, 1)
        for name, value in re.findall(r'runtime_resident_bytes\{process="(\w+)"\} (\S+)', text)
    }


def tier_options(device: str, settings: str) -> list[str]:
    """Options of a server with too small pools, a host tier and files. `settings`: JSON of the storage."""
    options = (
        f"--device {device} --served-model-name soak --log-level error --context-length 512 "
        "--max-total-tokens 2048 "
        "--enable-hierarchical-cache --hicache-ratio 1.5 --hicache-mem-layout page_first "
        "--hicache-storage-backend file --hicache-storage-prefetch-policy timeout"
    )
    options += " --dtype float32 --num-threads 1" if device == "cpu" else " --null-step-s 0.002"
    return [*options.split(), "--hicache-storage-backend-extra-config", settings]


def soak_tiers(device: str, seconds: float, kills: int) -> dict[str, Any]:
    """Kills come in the first half, so that the last ranks show whether they grow."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = json.dumps({"dir": folder, "max_bytes": 64 << 20, "prefetch_threshold": 32})
        options = tier_options(device, settings)
        with server(*options) as (port, pid, _):
            clients, begin = Tiers(port, 16 if device == "cpu" else 32), time.perf_counter()

            async def all_of_it(report: Callable[[], None]) -> None:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(clients.drive(begin + seconds))
                    for i in range(20):
                        await asyncio.sleep(max(0.0, begin + seconds * (i + 0.5) / 20 - time.perf_counter()))
                        if i < kills:
                            os.kill(random.choice(rank_pids(pid)), signal.SIGKILL)
                        if i % 2:
                            await asyncio.to_thread(report)

            def report() -> None:
                rows.append(
                    {
                        "s": round(time.perf_counter() - begin),
                        **clients.counts,
                        **resident(port),
                        **metrics(port),
                    }
                )
                print(rows[-1], flush=True)

            uvloop.run(all_of_it(report))
            time.sleep(2)  # the audit runs when the server idles
            left = json.loads(get(port, "/v1/loads")[1])["loads"][0]
            report()
    assert rows[-1]["changed"] == rows[-1]["cache_leaks_total"] == rows[-1]["failed_requests_total"] == 0, (
        rows[-1]
    )
    assert left["num_total_reqs"] == left["num_used_tokens"] == 0, left
    return {"rows": rows, "left": left}


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--tiers", action="store_true")
    parser.add_argument("--device", choices=("null", "cpu"), default="null")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--kills", type=int, default=6)
    args = parser.parse_args()
    if args.tiers:
        record(f"soak_tiers_{args.device}", soak_tiers(args.device, args.seconds, args.kills))
    else:
        record("soak", soak(args.requests))


def soak(requests: int) -> dict[str, Any]:
    """Short requests on the null device, with resident memory at every tenth."""
    rows = []
    with server(
        "--device",
        "null",
        "--served-model-name",
        "null",
        "--log-level",
        "error",
        "--max-total-tokens",
        "65536",
    ) as (port, _, _):
        begin = time.perf_counter()
        for tenth in range(10):
            uvloop.run(drive(port, requests // 10, tenth * requests))
            rows.append({"requests": (tenth + 1) * requests // 10, **resident(port)})
            print(rows[-1], flush=True)
            if time.perf_counter() - begin > LIMIT_S:
                break
        time.sleep(0.5)
        left = json.loads(get(port, "/v1/loads")[1])
    print(left)
    return {"resident_mib": rows, "left": left}


if __name__ == "__main__":
    main()
