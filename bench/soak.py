"""Does memory grow? 10,000 short requests, a third of them left half way, on the null device; bounded in count and time.

    python -m bench.soak [--requests 10000]

Prints resident memory of all server processes every tenth of the way, and at the end what the server says is still in use.
"""

import argparse
import asyncio
import json
import random
import re
import time

import uvloop

from bench.load import request_bytes
from bench.record import record
from bench.serve import get, server

STREAMS = 64
LIMIT_S = 600


async def one(port: int, request: bytes, leaves: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if leaves:
            await reader.read(random.randint(1, 2000))
        else:
            while not (await reader.read(65536)).endswith(b"0\r\n\r\n"):
                pass
    finally:
        writer.close()


async def drive(port: int, count: int, base: int) -> None:
    todo = iter(range(count))

    async def worker() -> None:
        for i in todo:
            body = {"model": "null", "prompt": [(base + i + k) % 2000 for k in range(24)], "max_tokens": 24, "stream": True,
                    "ignore_eos": True}
            await one(port, request_bytes(port, "/v1/completions", body), leaves=i % 3 == 0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS):
            tasks.create_task(worker())


def resident(port: int) -> dict[str, float]:
    """MiB of each server process, as /metrics tells."""
    text = get(port, "/metrics")[1].decode()
    return {name: round(float(value) / 2**20, 1) for name, value in re.findall(r'runtime_resident_bytes\{process="(\w+)"\} (\S+)', text)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    args = parser.parse_args()
    rows = []
    with server("--device", "null", "--served-model-name", "null", "--log-level", "error", "--max-total-tokens", "65536") as (port, pid, _):
        begin = time.perf_counter()
        for tenth in range(10):
            uvloop.run(drive(port, args.requests // 10, tenth * args.requests))
            rows.append({"requests": (tenth + 1) * args.requests // 10, **resident(port)})
            print(rows[-1], flush=True)
            if time.perf_counter() - begin > LIMIT_S:
                break
        time.sleep(0.5)
        left = json.loads(get(port, "/v1/loads")[1])
    record("soak", {"resident_mib": rows, "left": left})
    print(left)


if __name__ == "__main__":
    main()
