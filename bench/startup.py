"""From process start to the first answer, with the embedded model: /health, ready, first token; and its
resident memory.

Before that the command line alone: `runtime --help`, and parsing flags against the full table of options in a
fresh process.

    python -m bench.startup [--runs 5]
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import Any

from bench.load import tree_cpu_s
from bench.record import percentiles, record
from bench.serve import free_port, get

STANDBY_S = 20.0  # that a standby rank may take to import torch


def until(port: int, path: str, status: int | None) -> None:
    """Returns when `path` answers (with `status`, if given)."""
    while True:
        try:
            if status in (None, get(port, path)[0]):
                return
        except OSError:
            pass
        time.sleep(0.005)


def first_token(port: int) -> None:
    """Sends a streamed chat and returns at its first content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 4,
    }
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.status == 200, response.read()
    while b'"content"' not in response.readline():
        pass
    connection.close()


def resident_mib(pid: int) -> float:
    """Resident memory of a process, in MiB."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def idle_cpu(pid: int, port: int, seconds: float) -> float:
    """Share of a core that the process tree uses while it is idle."""
    deadline = time.monotonic() + STANDBY_S
    while time.monotonic() < deadline and not has_standby(port):
        time.sleep(0.2)  # a standby rank imports torch
    time.sleep(1)  # earlier requests are done
    before = tree_cpu_s(pid)
    time.sleep(seconds)
    return (tree_cpu_s(pid) - before) / seconds


def has_standby(port: int) -> bool:
    """Whether a standby rank waits."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return any(
            line.startswith(b"runtime_standby_ranks") and float(line.split()[-1]) > 0 for line in answer
        )


def one() -> dict[str, float]:
    """Figures of one server, from its start to its end."""
    port = free_port()
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime", "serve", "--port", str(port), "--log-level", "error"]
    )
    try:
        until(port, "/health", None)
        health = time.perf_counter() - begin
        first_token(port)
        token = time.perf_counter() - begin
        return {
            "health_s": health,
            "first_token_s": token,
            "loop_rss_mib": resident_mib(process.pid),
            "idle_cores": idle_cpu(process.pid, port, 3),
        }
    finally:
        process.terminate()
        process.wait(20)


PARSE = """
import time
import urllib.request
from runtime.options.parse import from_argv
from runtime.options.table import rows
begin = time.perf_counter()
words = [word for row in rows() if row.status == "works" and row.takes == "one" and row.default is not None
         for word in (row.flag, str(row.default))]
from_argv(words)
print(time.perf_counter() - begin)
"""


def command_line() -> dict[str, float]:
    """Seconds of `runtime --help`, start of the interpreter included, and of the first parse: table and every
    flag that works."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "runtime", "--help"], check=True, stdout=subprocess.DEVNULL)
    usage = time.perf_counter() - begin
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "runtime", "serve", "--help"], check=True, stdout=subprocess.DEVNULL
    )
    serve_usage = time.perf_counter() - begin
    parsed = subprocess.run([sys.executable, "-c", PARSE], check=True, capture_output=True, text=True).stdout
    return {"help_s": usage, "serve_help_s": serve_usage, "parse_s": float(parsed)}


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    count = parser.parse_args().runs
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # modules of an installed package are compiled
    runs = [command_line() | one() for _ in range(count)]
    results: dict[str, Any] = {name: percentiles([run[name] for run in runs], 4) for name in runs[0]}
    print(json.dumps(results, indent=2))
    record("startup", results)


if __name__ == "__main__":
    main()
