"""Everything at once for an hour, with kills: what goes wrong, and what grows.

    python -m bench.soak [--minutes 60] [--kills 10] [--jumps 12] [--device cpu|null]

Streams with shared prefixes, clients that leave or read slowly, adapters loaded and unloaded, grammars, stop
expressions, sessions, batches, background responses, three keys under fair share, one of which floods, the
hostile corpus and fuzzed requests, with pools that are too small for all of it, host memory and file tiers.
Ranks are killed in the first half, so that the last ones show whether they grow. The server's wall clock
jumps by hours, both ways.

The report (bench/results/soak.json): requests and errors by kind; answers compared with the first one to the
same request; latency of /health; resident memory, descriptors and threads of each process, with a line by
least squares over the last half: its slope is the growth per hour.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

from bench.processes import Watch
from bench.record import percentiles, record
from bench.soak_clients import THIRD_KEY, Clients
from tests.hostile.case import ADMIN_KEY, USER_KEY
from tests.hostile.jumping_clock import JumpingClock
from tests.hostile.neighbours import GOOD_KEY
from tests.hostile.target import Target, target

SAMPLE_S = 5.0
PROBE_S = 0.25
ADAPTERS = 3
# of the server's clock, one after the other: less than the day that a batch has
AHEAD_S = (5 * 3600.0, 0.0, -5 * 3600.0, 0.0)
COUNTERS = (
    "rank_restarts_total",
    "cache_leaks_total",
    "failed_requests_total",
    "preemptions_total",
    "host_loaded_tokens_total",
    "storage_fetched_tokens_total",
)


def options(device: str, folder: Path) -> list[str]:
    """A server with too small pools, all tiers, all stores, and three keys under fair share."""
    storage = json.dumps({"dir": str(folder / "pages"), "max_bytes": 64 << 20, "prefetch_threshold": 32})
    text = (
        f"--served-model-name pocket --context-length 512 --max-total-tokens 3072 --num-threads 1 "
        "--enable-hierarchical-cache --hicache-ratio 1.5 --hicache-mem-layout page_first "
        "--hicache-storage-backend file --hicache-storage-prefetch-policy timeout "
        "--file-storage-bytes 8388608 --max-body-bytes 1048576 --grammar-timeout 3 "
        "--fair-share key --enable-lora --max-lora-rank 8 --lora-target-modules all "
        f"--api-key {GOOD_KEY} {USER_KEY} {THIRD_KEY} --admin-api-key {ADMIN_KEY}"
    )
    own = "--device cpu --dtype float32" if device == "cpu" else "--device null --null-step-s 0.004"
    return [*text.split(), *own.split(), "--hicache-storage-backend-extra-config", storage]


def make_adapters(folder: Path) -> list[str]:
    """Folders of adapters of the embedded model."""
    from tests.models.make_adapter import make_adapter  # torch, which the clients do not need

    base = Path("runtime/pocket")
    return [str(make_adapter(base, folder / f"adapter-{i}", seed=i)) for i in range(ADAPTERS)]


async def probe(server: Target, until_s: float) -> dict[str, Any]:
    """Asks /health over and over: its answers, and how long they took."""
    states: dict[int, int] = {}
    took_ms: list[float] = []
    while time.monotonic() < until_s:
        begin = time.perf_counter()
        status = (await asyncio.to_thread(server.get, "/health"))[0]
        took_ms.append((time.perf_counter() - begin) * 1e3)
        states[status] = states.get(status, 0) + 1
        await asyncio.sleep(PROBE_S)
    return {"answers": states, "ms": percentiles(took_ms), "max_ms": round(max(took_ms), 1)}


async def kill(server: Target, times_s: list[float]) -> int:
    """Kills a rank at each of these times. Returns how many were killed."""
    count = 0
    for at_s in times_s:
        await asyncio.sleep(max(0.0, at_s - time.monotonic()))
        ranks = server.rank_pids()
        if ranks:
            os.kill(random.choice(ranks), signal.SIGKILL)
            count += 1
    return count


async def jump(clock: JumpingClock, times_s: list[float]) -> int:
    """Sets the clock to the next of AHEAD_S at each of these times. Returns how often."""
    for at_s, ahead_s in zip(times_s, cycle(AHEAD_S), strict=False):
        await asyncio.sleep(max(0.0, at_s - time.monotonic()))
        clock.set_ahead(ahead_s)
    return len(times_s)


async def soak(
    server: Target,
    clients: Clients,
    watch: Watch,
    kill_times_s: list[float],
    clock: JumpingClock,
    jump_times_s: list[float],
) -> dict[str, Any]:
    """Runs the clients to their end. Returns the report."""

    async def sample() -> None:
        while not clients.is_over:
            watch.sample(await asyncio.to_thread(server.pids))
            await asyncio.sleep(SAMPLE_S)

    begin_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(clients.run())
        tasks.create_task(sample())
        health = tasks.create_task(probe(server, clients.until_s))
        kills = tasks.create_task(kill(server, kill_times_s))
        jumps = tasks.create_task(jump(clock, jump_times_s))
    await asyncio.sleep(5)  # the audit runs when the server idles
    counts = dict(sorted(clients.counts.items()))
    metrics = server.metrics()
    return {
        "minutes": round((time.monotonic() - begin_s) / 60, 1),
        "requests": sum(counts.values()),
        "kills": kills.result(),
        "jumps_of_the_clock": jumps.result(),
        "outcomes": counts,
        "answers_compared": sum(n for name, n in counts.items() if name.endswith((": same", ": different"))),
        "answers_different": sum(n for name, n in counts.items() if name.endswith(": different")),
        "wrong": clients.wrong,
        "unexpected_errors_in_the_log": len(server.bugs()),
        "health": health.result(),
        "counters": {name: int(metrics[name]) for name in COUNTERS if name in metrics},
        "left": {name: int(metrics[name]) for name in ("running_sequences", "waiting_requests")},
        "mib_by_second": watch.series(),
        "growth_over_the_last_half": watch.growth((clients.until_s - begin_s) / 2),
    }


def main() -> None:
    """Runs the soak, prints its report and records it in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("null", "cpu"), default="cpu")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--jumps", type=int, default=12, help="of the server's wall clock")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="what else ran on the machine, for the report")
    parser.add_argument("--log", type=Path, help="a file for the server's log, to read afterwards")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = make_adapters(folder)
        clock = JumpingClock(folder / "clock")
        with target(folder, *options(args.device, folder), clock=clock) as server:
            begin_s, length_s = time.monotonic(), args.minutes * 60
            clients = Clients(server.port, begin_s + length_s, args.seed, adapters)
            times_s = [begin_s + length_s / 2 * (i + 0.5) / args.kills for i in range(args.kills)]
            jumps_s = [begin_s + length_s * (i + 0.5) / args.jumps for i in range(args.jumps)]
            report = asyncio.run(soak(server, clients, Watch(), times_s, clock, jumps_s))
        if args.log is not None:
            args.log.write_bytes(server.log.read_bytes())
    report = {"device": args.device, "note": args.note} | report
    print(json.dumps(report, indent=2))
    record("soak", report)


if __name__ == "__main__":
    main()
