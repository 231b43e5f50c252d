"""What it costs to compute prompts on another server.

    python -m bench.disaggregation [--mib 512] [--prompts 20] [--tokens 256 960]

Pages: MiB/s of pages from host memory to host memory over loopback, as two servers move them (checksums on
both sides), beside a plain socket that moves the same bytes between two processes, in turns. And of pages
that one server reads in the memory of another on the same machine (shm), beside memcpy.

First token: time from sending a prompt to the end of an answer of one token, of one server that does all, and
of a pair that is asked as a router asks them, in turns, on random prompts; and the same of two tokens, of
which the second one waits for all pages. The model is random: --model-path takes another one.
"""

import argparse
import json
import multiprocessing
import os
import random
import secrets
import socket
import threading
import time
import urllib.request
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from anyio import CapacityLimiter, run
from msgspec.msgpack import Decoder

from bench.record import record
from bench.serve import server
from runtime.devices.host_memory import HostPages
from runtime.messages.transfer import Pages, Transfer
from runtime.transfer.key import HEADER, header_value
from runtime.transfer.layout import RankPages
from runtime.transfer.reading import Places
from runtime.transfer.service import PORTION_BYTES
from runtime.transfer.transports import SharedMemory
from runtime.transfer.wire import accept, connect

KEY = secrets.token_hex(16).encode()
PART = 64 << 10  # bytes of a layer's keys in a page of 64 tokens: 4 heads of 128 in 16 bits
LAYERS = 32
ROUNDS = 7
PAGES = Decoder(Pages)


def host(num_pages: int) -> RankPages:
    """Host memory of one rank, every page touched."""
    parts = (PART,) * (2 * LAYERS)
    fd = os.memfd_create("pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_pages * sum(parts))
    pages = HostPages(fd, num_pages, parts, "page_first")
    for number in range(num_pages):
        for view in pages.views(number):
            view[:] = bytes([number % 251]) * len(view)
    return RankPages([pages], [], 64, 1, num_heads=4, fds=[fd])


def portions(pages: RankPages, num_pages: int) -> list[range]:
    """Pages behind one message."""
    size = max(1, PORTION_BYTES // pages.layout.page_bytes)
    return [range(at, min(at + size, num_pages)) for at in range(0, num_pages, size)]


async def send_pages(connection: socket.socket, num_pages: int) -> None:
    """The sender's side."""
    pages, wire = host(num_pages), await accept(connection, KEY, CapacityLimiter(1))
    for _ in range(ROUNDS):
        await wire.receive(PAGES, None)
        for part in portions(pages, num_pages):
            await wire.send_pages(Pages(len(part)), pages.views(part))


async def receive_pages(port: int, num_pages: int) -> float:
    """-> MiB/s of the median round"""
    pages, wire = host(num_pages), await connect("127.0.0.1", port, KEY, CapacityLimiter(1))
    times: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        await wire.send(Pages(0))
        for part in portions(pages, num_pages):
            await wire.receive(PAGES)
            await wire.receive_pages(pages.views(part))
        times.append(time.perf_counter() - begin)
    wire.close()
    return num_pages * pages.layout.page_bytes / 2**20 / median(times)


def send_plain(connection: socket.socket, num_pages: int) -> None:
    """Sends the bytes of the pages from where they lie, without anything else."""
    pages = host(num_pages)
    for _ in range(ROUNDS):
        connection.recv(1)
        for part in portions(pages, num_pages):
            for view in pages.views(part):
                connection.sendall(view)


def receive_plain(port: int, num_bytes: int) -> float:
    """-> MiB/s of the median round"""
    times: list[float] = []
    room = memoryview(bytearray(num_bytes))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            connection.send(b"x")
            at = 0
            while at < num_bytes:
                at += connection.recv_into(room[at : at + PORTION_BYTES])
            times.append(time.perf_counter() - begin)
    return num_bytes / 2**20 / median(times)


def _sender(listener: socket.socket, num_pages: int, *, is_plain: bool) -> None:
    connection, _ = listener.accept()
    if is_plain:
        send_plain(connection, num_pages)
    else:
        connection.setblocking(False)
        run(send_pages, connection, num_pages)


def move(num_pages: int, *, is_plain: bool) -> float:
    """One run with a process for the sender. -> MiB/s"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = multiprocessing.get_context("fork").Process(
            target=_sender, args=(listener, num_pages), kwargs={"is_plain": is_plain}
        )
        sender.start()
        port: int = listener.getsockname()[1]
        if is_plain:
            speed = receive_plain(port, num_pages * 2 * LAYERS * PART)
        else:
            speed = run(receive_pages, port, num_pages)
        sender.join()
    return speed


def read_shared(num_pages: int) -> tuple[float, float]:
    """MiB/s of pages that are read in the memory of another server, and of memcpy of the same bytes, in
    turns; medians."""
    source, target = host(num_pages), host(num_pages)
    places, transport = Places(source.memory(b""), source.layout), SharedMemory()
    transport.add(source)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number, is_plain in product(range(-1, ROUNDS), (True, False)):
        begin = time.perf_counter()
        for part in portions(source, num_pages):
            if is_plain:
                for own, other in zip(target.views(part), source.views(part), strict=True):
                    own[:] = other
            else:
                reading = transport.open(source.memory(b""), [os.dup(fd) for fd in source.fds])
                reading.read(list(places.pages(part, target.views(part))))
                reading.close()
        if number >= 0:  # the first round maps pages that later ones find
            times[is_plain].append(time.perf_counter() - begin)
    num_mib = num_pages * source.layout.page_bytes / 2**20
    return num_mib / median(times[False]), num_mib / median(times[True])


def first_token_ms(port: int, ids: list[int], transfer: Transfer | None, count: int = 1) -> float:
    """Time to the first token of a server, or to `count` of them."""
    params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params}
    headers = {"content-type": "application/json"}
    if transfer is not None:
        headers[HEADER] = header_value(KEY, transfer)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), headers)
    begin = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        answer.read()
    return (time.perf_counter() - begin) * 1e3


def pair_ms(prefill: int, decode: int, source: str, ids: list[int], count: int) -> float:
    """Time to `count` tokens of a pair."""
    room = secrets.randbits(60)
    prompt = threading.Thread(target=first_token_ms, args=(prefill, ids, Transfer(room)))
    prompt.start()
    taken = first_token_ms(decode, ids, Transfer(room, source), count)
    prompt.join()
    return taken


def first_tokens(args: Any) -> list[dict[str, Any]]:
    """Rows of first tokens, by length of prompts."""
    rows = []
    with TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_bytes(KEY)
        key.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            pages_port = free.getsockname()[1]
        options = "--model-path", args.model_path, "--log-level", "error", "--num-threads", "1"
        own = *options, "--disaggregation-key-file", str(key)
        prefill = "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(pages_port)
        with (
            server(*options) as (alone, _, _),
            server(*own, *prefill) as (first, _, _),
            server(*own, "--disaggregation-mode", "decode") as (second, _, _),
        ):
            source = f"127.0.0.1:{pages_port}"
            for length, count in product(args.tokens, (1, 2)):
                times: dict[str, list[float]] = {"alone": [], "pair": []}
                for number in range(args.prompts + 2):
                    ids = [random.randrange(200) for _ in range(length)]
                    one = first_token_ms(alone, ids, None, count)
                    two = pair_ms(first, second, source, ids, count)
                    if number > 1:  # after a warm-up
                        times["alone"].append(one)
                        times["pair"].append(two)
                one, two = median(times["alone"]), median(times["pair"])
                rows.append(
                    {
                        "tokens": length,
                        "answer": count,
                        "one_server_ms": round(one, 1),
                        "pair_ms": round(two, 1),
                        "more_ms": round(two - one, 1),
                    }
                )
    return rows


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="of pages in each round")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 960])
    parser.add_argument("--model-path", default="pocket")
    args = parser.parse_args()
    num_pages = args.mib * 2**20 // (2 * LAYERS * PART)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(3):
        for is_plain in (True, False):
            speeds[is_plain].append(move(num_pages, is_plain=is_plain))
    plain, pages = median(speeds[True]), median(speeds[False])
    shared, copied = read_shared(num_pages)
    result = {
        "plain_socket_mib_per_s": round(plain),
        "pages_mib_per_s": round(pages),
        "pages_by_plain": round(pages / plain, 2),
        "memcpy_mib_per_s": round(copied),
        "shared_mib_per_s": round(shared),
        "shared_by_memcpy": round(shared / copied, 2),
        "first_token": first_tokens(args),
    }
    print(json.dumps(result, indent=2))
    record("disaggregation", result)


if __name__ == "__main__":
    main()
