"""What a streamed token costs: the whole server on the null device, `--streams` clients, 128 tokens each, on
one machine.

    python -m bench.http [--streams 1 16 64 128] [--rounds 8]

The figure that counts is the CPU of all server processes per output token; tokens/s includes the client,
which shares the cores.
"""

import argparse

from bench import load
from bench.record import record
from bench.serve import server

TOKENS = 128
VOCAB = 2000


def bodies(count: int, base: int) -> list[tuple[str, dict[str, object]]]:
    """Unique prompts of 128 tokens: nothing comes from the prefix cache."""
    return [
        (
            "/v1/completions",
            {
                "model": "null",
                "prompt": [(base + i + k * 7) % VOCAB for k in range(128)],
                "max_tokens": TOKENS,
                "stream": True,
                "temperature": 0,
                "ignore_eos": True,
            },
        )
        for i in range(count)
    ]


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--rounds", type=int, default=8, help="requests per stream in each run")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    rows = []
    with server(
        "--device",
        "null",
        "--served-model-name",
        "null",
        "--log-level",
        "error",
        "--max-running-requests",
        "256",
    ) as (port, pid, _):
        for streams in args.streams:
            load.run(port, pid, streams=streams, bodies=bodies(streams, 0), tokens_each=TOKENS)  # warm-up
            runs = [
                load.run(
                    port,
                    pid,
                    streams=streams,
                    bodies=bodies(streams * args.rounds, 1000 * k),
                    tokens_each=TOKENS,
                )
                for k in range(args.runs)
            ]
            best = sorted(runs, key=lambda r: r.server_cpu_s / r.tokens)[len(runs) // 2]  # the median run
            rows.append(best.figures)
            print(best.figures, flush=True)
    record("http", {"runs": rows})


if __name__ == "__main__":
    main()
