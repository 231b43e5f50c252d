"""What receiving pages costs the streams of a decode server.

    python -m bench.receiving [--streams 4] [--prompts-per-s 8] [--tokens 960] [--seconds 3] [--rounds 3]

Streams run on a decode server, and prompts come to it whose pages a prefill server has in host memory
already, so that it has nearly nothing to compute. In turns, of equal length:

    quiet       the prefill server gets these prompts, and the decode server as many short ones of its own
    receiving   both get them, and the pages move

Both phases have the same requests, but for the pages: the ratio of the streams' tokens is what moving them
costs. The model is random: --model-path takes another one.
"""

import argparse
import json
import random
import re
import secrets
import socket
import threading
import time
import urllib.request
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from bench.disaggregation import KEY, first_token_ms
from bench.record import record
from bench.serve import server
from runtime.messages.transfer import Transfer

TAIL = 16  # tokens that a decode server computes of a prompt, about


def stream(port: int, stop: threading.Event) -> None:
    """One answer after the other, of a short prompt each, until `stop`."""
    while not stop.is_set():
        body = {
            "input_ids": [random.randrange(200) for _ in range(TAIL)],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True},
        }
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()


def counter(port: int, name: str) -> float:
    """A counter of /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))


def phase(
    prefill: int, decode: int, source: str | None, prompts: list[list[int]], per_s: float, seconds: float
) -> dict[str, float]:
    """Sends prompts at a rate, to both servers with `source`, else to each its own. -> tokens/s of the decode
    server, and MiB/s of pages"""
    names = "runtime_generated_tokens_total", 'runtime_transfer_bytes_total{way="received"}'
    before = [counter(decode, name) for name in names]
    threads: list[threading.Thread] = []
    begin = time.perf_counter()
    for number in range(int(per_s * seconds)):
        time.sleep(max(0.0, begin + number / per_s - time.perf_counter()))
        ids = prompts.pop()
        room = secrets.randbits(60)
        asked = (ids, None if source is None else Transfer(room, source))
        if source is None:
            asked = ([random.randrange(200) for _ in range(TAIL)], None)
        threads.append(threading.Thread(target=first_token_ms, args=(prefill, ids, Transfer(room))))
        threads.append(threading.Thread(target=first_token_ms, args=(decode, *asked)))
        for thread in threads[-2:]:
            thread.start()
    time.sleep(max(0.0, begin + seconds - time.perf_counter()))
    taken = time.perf_counter() - begin
    tokens, received = (counter(decode, name) - at for name, at in zip(names, before, strict=True))
    for thread in threads:
        thread.join()
    return {"tokens_per_s": tokens / taken, "mib_per_s": received / taken / 2**20}


def measure(args: Any) -> dict[str, float]:
    """The medians of both phases."""
    with TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_bytes(KEY)
        key.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            pages_port = free.getsockname()[1]
        options = "--model-path", args.model_path, "--log-level", "error", "--num-threads", "1"
        own = *options, "--disaggregation-key-file", str(key), "--disaggregation-mode"
        with (
            server(*own, "prefill", "--disaggregation-bootstrap-port", str(pages_port)) as (first, _, _),
            server(*own, "decode") as (second, _, _),
        ):
            count = int(args.prompts_per_s * args.seconds) * (2 * args.rounds + 1)
            prompts = [[random.randrange(200) for _ in range(args.tokens)] for _ in range(count)]
            for ids in prompts:
                first_token_ms(first, ids, Transfer(secrets.randbits(60)))
            stop = threading.Event()
            streams = [threading.Thread(target=stream, args=(second, stop)) for _ in range(args.streams)]
            for thread in streams:
                thread.start()
            found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            given = prompts, args.prompts_per_s, args.seconds
            phase(first, second, f"127.0.0.1:{pages_port}", *given)  # a warm-up
            for _ in range(args.rounds):
                for is_receiving in (False, True):
                    source = f"127.0.0.1:{pages_port}" if is_receiving else None
                    found[is_receiving].append(phase(first, second, source, *given))
            stop.set()
            for thread in streams:
                thread.join()
    quiet, receiving = (median(one["tokens_per_s"] for one in found[which]) for which in (False, True))
    return {
        "quiet_tokens_per_s": round(quiet, 1),
        "receiving_tokens_per_s": round(receiving, 1),
        "received_mib_per_s": round(median(one["mib_per_s"] for one in found[True]), 1),
        "receiving_by_quiet": round(receiving / quiet, 3),
    }


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts-per-s", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=960)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model-path", default="pocket")
    result = measure(parser.parse_args())
    print(json.dumps(result, indent=2))
    record("receiving", result)


if __name__ == "__main__":
    main()
