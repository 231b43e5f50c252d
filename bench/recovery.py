"""From kill -9 of a rank to the next token of its streams, with the embedded model.

    python -m bench.recovery [--streams 8] [--kills 5]

Measured twice: with a standby rank, which each kill finds complete, and without.

Every stream is read to its end and compared with its undisturbed answer; a lost, repeated or different token
ends the bench. The dtype is float32: in bfloat16 a decoded token that is computed again as part of a prompt
differs by rounding, which may change a later token, as any change of a batch may.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import uvloop

from bench.load import request_bytes
from bench.record import percentiles, record
from bench.serve import get, server

NEW_TOKENS = 128
WANTED_S = {"with_standby": 0.6, "without_standby": 3.0}


class Stream:
    """The text that one client has received, and when each part arrived."""

    def __init__(self) -> None:
        self.text = ""
        self.reads: list[float] = []

    async def read(self, port: int, body: dict[str, object]) -> None:
        """Reads one answer to its end. Raises ConnectionError if it ends early."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(port, "/v1/completions", body))
        while not (line := await reader.readline()).startswith(b"data: [DONE]"):
            if not line:
                raise ConnectionError("a stream ended early")
            if line.startswith(b"data: "):
                self.reads.append(time.perf_counter())
                self.text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
        writer.close()


def body(i: int) -> dict[str, object]:
    """The request of stream `i`: greedy or seeded, so that its answer is known."""
    return {
        "model": "pocket",
        "prompt": [i + 1, *range(20, 52)],
        "max_tokens": NEW_TOKENS,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0.8 if i % 2 else 0,
        "seed": i,
    }


def rank_pids(pid: int, kind: str = "rank") -> list[int]:
    """Process ids of the server's ranks, or of its standby ranks (`kind` standby)."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child) for child in children if Path(f"/proc/{child}/comm").read_text().startswith(f"{kind}-")
    ]


async def run(port: int, pid: int, streams: int, is_disturbed: bool) -> tuple[list[str], float]:
    """Texts of all streams, and seconds from the kill to the end of the silence that follows it."""
    clients = [Stream() for _ in range(streams)]
    killed = 0.0
    async with asyncio.TaskGroup() as tasks:
        for i, client in enumerate(clients):
            tasks.create_task(client.read(port, body(i)))
        if is_disturbed:
            while min(len(client.reads) for client in clients) < NEW_TOKENS // 8:
                await asyncio.sleep(0.002)
            killed = time.perf_counter()
            os.kill(random.choice(rank_pids(pid)), signal.SIGKILL)
    return [client.text for client in clients], silence_end(clients, killed) - killed


def silence_end(clients: list[Stream], killed: float) -> float:
    """The end of the longest silence of all streams together after the kill. Data in flight at the kill
    arrives before it."""
    reads = [killed, *sorted(at for client in clients for at in client.reads if at > killed)]
    return max(zip(reads, reads[1:], strict=False), key=lambda pair: pair[1] - pair[0])[1]


def metric(port: int, name: str) -> float:
    """The value of a metric without labels."""
    found = re.search(rf"^{name} (\S+)$".encode(), get(port, "/metrics")[1], re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def measure(streams: int, kills: int, num_standby: int) -> dict[str, Any]:
    """Kills ranks of one server, each time when the standby ranks are complete."""
    pauses: list[float] = []
    options = ("--log-level", "critical", "--dtype", "float32", "--standby-ranks", str(num_standby))
    with server(*options) as (port, pid, ready_s):
        expected, _ = uvloop.run(run(port, pid, streams, False))
        for _ in range(kills):
            while metric(port, "runtime_standby_ranks") < num_standby:
                time.sleep(0.1)
            texts, pause = uvloop.run(run(port, pid, streams, True))
            assert texts == expected, "an answer changed"
            pauses.append(pause)
        assert metric(port, "runtime_rank_restarts_total") == kills
    return {
        "cold_start_s": round(ready_s, 3),
        "kill_to_next_token_s": percentiles(pauses, 3),
        "least_s": round(min(pauses), 3),
        "answers_changed": 0,
    }


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--kills", type=int, default=5)
    args = parser.parse_args()
    results: dict[str, Any] = {
        "streams": args.streams,
        "kills": args.kills,
        "with_standby": measure(args.streams, args.kills, 1),
        "without_standby": measure(args.streams, args.kills, 0),
        "wanted_s": WANTED_S,
    }
    print(json.dumps(results, indent=2))
    record("recovery", results)


if __name__ == "__main__":
    main()
