"""What `runtime route` costs: CPU of the router for each request and each streamed token, beside that of the
server that it stands before (null device), which is measured without the router too, in turns.

    python -m bench.route [--streams 1 16 64] [--rounds 8] [--policy cache_aware]
"""

import argparse
from statistics import median
from typing import Any

from bench import load
from bench.http import TOKENS, bodies
from bench.record import record
from bench.serve import server

SERVER = ("--device", "null", "--served-model-name", "null", "--log-level", "error")


def compare(
    port: int, pid: int, router_port: int, router_pid: int, streams: int, args: Any
) -> dict[str, Any]:
    """CPU of the server when clients are its own, and of server and router when they come through it."""
    alone: list[float] = []
    behind: list[float] = []
    router: list[float] = []
    requests: list[float] = []
    for run in range(args.runs + 1):
        prompts = bodies(streams * args.rounds, 1000 * run)
        direct = load.run(port, pid, streams=streams, bodies=prompts, tokens_each=TOKENS)
        cpu_s = load.tree_cpu_s(router_pid)
        routed = load.run(router_port, pid, streams=streams, bodies=prompts, tokens_each=TOKENS)
        cpu_s = load.tree_cpu_s(router_pid) - cpu_s
        if run == 0:  # warm-up
            continue
        alone.append(direct.server_cpu_s / direct.tokens * 1e6)
        behind.append(routed.server_cpu_s / routed.tokens * 1e6)
        router.append(cpu_s / routed.tokens * 1e6)
        requests.append(cpu_s / routed.requests * 1e6)
    return {
        "streams": streams,
        "server_us_per_token": round(median(alone), 1),
        "server_behind_router_us_per_token": round(median(behind), 1),
        "router_us_per_token": round(median(router), 1),
        "router_us_per_request_of_128_tokens": round(median(requests)),
        "router_by_server": round(median([a / b for a, b in zip(router, behind, strict=True)]), 2),
    }


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=8, help="requests per stream in each run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--policy", default="cache_aware")
    args = parser.parse_args()
    rows = []
    with server(*SERVER, "--max-running-requests", "256") as (port, pid, _):
        urls = "--worker-urls", f"http://127.0.0.1:{port}", "--policy", args.policy
        with server(*urls, "--log-level", "error", command="route") as (router_port, router_pid, _):
            for streams in args.streams:
                rows.append(compare(port, pid, router_port, router_pid, streams, args))
                print(rows[-1], flush=True)
    record("route", {"policy": args.policy, "runs": rows})


if __name__ == "__main__":
    main()
