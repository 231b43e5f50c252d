"""The hostile corpus at length against a real server: what is answered wrongly, and what others feel.

    python -m bench.hostile [--count 20000] [--seed 0] [--rounds 3] [--at-once 16] [--device null|cpu]

First `--rounds` times the corpus (tests/hostile/corpus.py), then `--count` fuzzed requests from `--seed` on,
from a process of their own. Meanwhile: good requests whose answers are compared with those of the quiet
server, long streams whose gaps between tokens are measured, and /health over and over. Afterwards the server
must hold nothing: requests, pages, descriptors.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from bench.processes import role, usage
from bench.record import record
from tests.hostile.attack import attack, misanswered
from tests.hostile.case import CHAT, Case, chat
from tests.hostile.corpus import CORPUS
from tests.hostile.fuzz import complaint, fuzzed
from tests.hostile.neighbours import GOOD_KEY, Neighbours
from tests.hostile.target import MODEL, NULL, OPTIONS, Target, target
from tests.hostile.wire import Reply

STREAMS = 8
PROBE_S = 0.02
QUIET_S = 10.0
SHOWN = 20


class Gaps:
    """Times between the tokens of long streams, and those of /health, in milliseconds."""

    def __init__(self, server: Target) -> None:
        self.port = server.port
        self.tokens_ms: list[float] = []
        self.health_ms: list[float] = []

    async def stream(self, stop: asyncio.Event) -> None:
        """Long streams, one after the other. Raises ConnectionError for one that ends early."""
        request = Case(
            "gaps", CHAT, chat(max_tokens=400, stream=True, ignore_eos=True), key=GOOD_KEY
        ).request()
        while not stop.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(request)
            before, is_complete = 0.0, False
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if before:
                        self.tokens_ms.append((now - before) * 1e3)
                    before = now
                is_complete |= line.startswith(b"data: [DONE]")
            writer.close()
            if not is_complete:
                raise ConnectionError("a stream ended early")

    async def probe(self, stop: asyncio.Event) -> None:
        """Asks /health on a connection of its own each time."""
        while not stop.is_set():
            begin = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            head = await reader.read()
            self.health_ms.append((time.perf_counter() - begin) * 1e3)
            writer.close()
            if not head.startswith(b"HTTP/1.1 200"):
                raise ConnectionError(f"/health answered {head[:100]!r}")
            await asyncio.sleep(PROBE_S)

    def figures(self) -> dict[str, dict[str, float]]:
        """Percentiles of what was measured, which then begins anew."""
        report = {"between_tokens_ms": spread(self.tokens_ms), "health_ms": spread(self.health_ms)}
        self.tokens_ms, self.health_ms = [], []
        return report


def spread(values: list[float]) -> dict[str, float]:
    """Number, p50, p99, p99.9 and maximum of at least one value, by the nearest rank."""
    ordered = sorted(values)
    at = {f"p{p:g}": ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))] for p in (50, 99, 99.9)}
    return {"count": len(ordered)} | {name: round(v, 2) for name, v in (at | {"max": ordered[-1]}).items()}


def attack_from_here(
    port: int, has_model: bool, seed: int, count: int, rounds: int, at_once: int
) -> dict[str, Any]:
    """Sends everything; for a process of its own. Returns statuses and what was answered wrongly."""
    statuses: Counter[int] = Counter()
    corpus = {case.name for case in CORPUS}

    def judge(case: Case, reply: Reply) -> str | None:
        statuses[reply.status] += 1
        return misanswered(case, reply) if case.name in corpus else complaint(case, reply)

    cases = [case for case in CORPUS if has_model or not case.needs_model] * rounds
    Random(seed).shuffle(cases)
    begin = time.perf_counter()
    wrong = asyncio.run(attack(port, cases, judge, at_once))
    for first in range(seed, seed + count, 1000):
        some = [fuzzed(number) for number in range(first, min(first + 1000, seed + count))]
        wrong += asyncio.run(attack(port, some, judge, at_once))
    return {
        "corpus": len(cases),
        "fuzzed": count,
        "requests_per_s": round((len(cases) + count) / (time.perf_counter() - begin)),
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
        "answered_wrongly": len(wrong),
        "wrong": wrong[:SHOWN],
    }


async def measure(server: Target, arguments: argparse.Namespace) -> dict[str, Any]:
    """A quiet server first, then the same next to the attack."""
    neighbours, gaps, stop = (
        Neighbours(server.port, has_model=server.has_model),
        Gaps(server),
        asyncio.Event(),
    )
    await neighbours.learn()
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(gaps.stream(stop))
            tasks.create_task(gaps.probe(stop))
            await asyncio.sleep(QUIET_S)
            quiet = gaps.figures()
            tasks.create_task(neighbours.run(stop))
            how = (arguments.seed, arguments.count, arguments.rounds, arguments.at_once)
            attacked = await loop.run_in_executor(
                other, attack_from_here, server.port, server.has_model, *how
            )
            stop.set()
    return attacked | {
        "good_answers_right": neighbours.num_right,
        "good_answers_wrong": neighbours.wrong[:SHOWN],
        "quiet": quiet,
        "under_attack": gaps.figures(),
    }


def held(server: Target) -> dict[str, dict[str, float]]:
    """MiB and descriptors of each process."""
    usages = {f"{role(pid)} {pid}": usage(pid, 0.0) for pid in server.pids()}
    return {
        name: {"mib": round(one.own_mib, 1), "descriptors": one.descriptors} for name, one in usages.items()
    }


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("null", "cpu"), default="null")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=16)
    arguments = parser.parse_args()
    device = (*NULL, "--null-step-s", "0.005") if arguments.device == "null" else MODEL
    with tempfile.TemporaryDirectory() as folder, target(Path(folder), *device, *OPTIONS) as server:
        before = held(server)
        report = asyncio.run(measure(server, arguments))
        time.sleep(5)  # the audit runs when the server idles
        metrics = server.metrics()
        report |= {
            "before": before,
            "after": held(server),
            "unexpected_errors_in_the_log": [bug[-2000:] for bug in server.bugs()[:SHOWN]],
            "left": {
                name: metrics[name] for name in ("running_sequences", "waiting_requests", "cache_leaks_total")
            },
        }
    print(json.dumps(report, indent=2))
    record(f"hostile_{arguments.device}", report)
    if report["answered_wrongly"] or report["good_answers_wrong"] or report["unexpected_errors_in_the_log"]:
        raise SystemExit("the server answered wrongly: see above")


if __name__ == "__main__":
    main()
