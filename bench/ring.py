"""How long a message takes from the event loop to another process and back: `python -m bench.ring`.

    echo     through Writer and Reader of runtime/ranks/ring.py, payloads of 0 bytes, 1 KB and 64 KB
    step     through Ranks and a rank of the null device: a StepPlan of 64 decodes and its StepResult, with
             encoding and decoding

Both processes wait in the kernel, so the figures have two wake-ups in them. Where an idle core goes to sleep,
above all in a virtual machine, waking it is most of the time: `floor` is the same ping-pong on bare eventfds,
without a ring. So all is measured twice: as the machine is, and with the cores kept awake by
processes that give way to everything (SCHED_IDLE).
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import uvloop

from bench.record import percentiles, record
from runtime.actors.ranks import Ranks
from runtime.messages.codec import Wire
from runtime.messages.ranks import FromRank, StartRank, ToRank
from runtime.messages.steps import StepPlan, StepResult
from runtime.ranks import ring

ROWS = 64
WARM_UP = 500
PAYLOADS = {"echo_0": 0, "echo_1kb": 1 << 10, "echo_64kb": 64 << 10}


async def round_trips(
    send: Callable[[int], Any], fd: int, receive: Callable[[], Any], count: int
) -> list[float]:
    """Microseconds of each trip; `receive` is called when `fd` is readable and the next one is sent from
    there."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    times: list[float] = []
    sent_s = 0.0

    def step() -> None:
        nonlocal sent_s
        receive()
        times.append((time.perf_counter() - sent_s) * 1e6)
        if len(times) == count:
            loop.remove_reader(fd)
            done.set_result(None)
        else:
            sent_s = time.perf_counter()
            send(len(times))

    loop.add_reader(fd, step)
    sent_s = time.perf_counter()
    send(0)
    await done
    return times[WARM_UP:]


def child(kind: str, *fds: str) -> subprocess.Popen[bytes]:
    """Starts the other process of a ping-pong, which inherits `fds`."""
    numbers = [int(fd) for text in fds for fd in text.split(",")]
    return subprocess.Popen([sys.executable, "-m", "bench.ring", kind, *fds], pass_fds=numbers)


async def floor(count: int) -> list[float]:
    """Microseconds of round trips through bare eventfds."""
    there, back = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
    with child("--floor", str(there), str(back)) as process:
        times = await round_trips(
            lambda _: os.eventfd_write(there, 1), back, lambda: os.eventfd_read(back), count
        )
        os.eventfd_write(there, 2)
        process.wait()
    os.close(there)
    os.close(back)
    return times


async def echo(payload: bytes, count: int) -> list[float]:
    """Microseconds of round trips of `payload` through two rings."""
    there, back = ring.create(), ring.create()
    writer, reader = ring.Writer(there, 1), ring.Reader(back, 1)
    with child("--echo", str(there), str(back)) as process:
        times = await round_trips(
            lambda _: writer.try_publish(payload), reader.fileno(), reader.read_nowait, count
        )
        process.kill()
    for end in (writer, reader, there, back):
        end.close()
    return times


async def step(count: int) -> tuple[list[float], list[float]]:
    """Round trips of steps, and how much of each was the null device."""
    ranks = Ranks(
        StartRank(
            device="null",
            model_path="",
            dtype="auto",
            load_format="auto",
            tp_size=1,
            page_size=16,
            max_slots=ROWS,
            max_len=1 << 20,
            max_step_tokens=ROWS,
            memory_fraction=0.5,
            max_total_tokens=None,
            num_threads=None,
            rendezvous="",
            seed=0,
        )
    )
    await ranks.start(lambda progress: None)
    arrived = asyncio.Event()
    ranks.set_wake(arrived.set)
    times, computes = [], []
    for number in range(count):
        plan = decode_plan(number)
        begin_s = time.perf_counter()
        ranks.submit(plan)
        await arrived.wait()
        arrived.clear()
        computes += [result.compute_s * 1e6 for result in ranks.results()]
        times.append((time.perf_counter() - begin_s) * 1e6)
    await ranks.stop()
    return times[WARM_UP:], computes[WARM_UP:]


def decode_plan(number: int) -> StepPlan:
    """A step in which all rows decode and four pages are added."""
    pages = np.arange(4, dtype=np.int32)
    return StepPlan(
        step=number,
        num_decodes=ROWS,
        slots=np.arange(ROWS, dtype=np.int32),
        counts=np.ones(ROWS, np.int32),
        samples=np.ones(ROWS, np.uint8),
        page_slots=pages,
        page_rows=pages,
        page_ids=pages,
    )


def encodings(count: int) -> dict[str, float]:
    """Microseconds to encode and decode what a step of 64 decodes sends."""
    nothing = np.empty(0, np.float32)
    result = StepResult(0, np.arange(ROWS, dtype=np.int32), -1, nothing, nothing, nothing, [], 0.0)
    figures = {}
    for name, union, message in (("plan", ToRank, decode_plan(0)), ("result", FromRank, result)):
        wire = Wire[Any](union)
        figures[f"encode_{name}"] = median_us(partial(wire.encode, message), count)
        figures[f"decode_{name}"] = median_us(partial(wire.decode, bytearray(wire.encode(message))), count)
    return figures


def median_us(call: Callable[[], Any], count: int) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(count):
        begin_s = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin_s) * 1e6)
    return percentiles(times)["p50"]


async def measure(count: int) -> dict[str, Any]:
    """p50, p90 and p99 of every kind of round trip."""
    results: dict[str, Any] = {"floor": percentiles(await floor(count))}
    for name, size in PAYLOADS.items():
        results[name] = percentiles(await echo(bytes(size), count))
    times, computes = await step(count)
    results["step_64_rows"] = percentiles(times)
    results["of_it_the_null_device"] = percentiles(computes)
    return results


@contextmanager
def awake_cores() -> Iterator[None]:
    """Keeps all cores awake, with processes that yield to every other one."""
    spin = (
        "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        f"while os.getppid() == {os.getpid()}: pass"
    )
    spinners = [subprocess.Popen([sys.executable, "-c", spin]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def run_floor(there: int, back: int) -> None:
    """The other process of `floor`: answers until the stop value arrives."""
    while os.eventfd_read(there) == 1:
        os.eventfd_write(back, 1)


def run_echo(there: ring.RingFds, back: ring.RingFds) -> None:
    """The other process of `echo`: sends every message back."""
    reader, writer = ring.Reader(there, 1), ring.Writer(back, 1)
    while (message := reader.read()) is not None:
        writer.publish(message)


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="round trips of each kind")
    parser.add_argument("--floor", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--echo", nargs=2, type=ring.RingFds.parse, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.floor:
        return run_floor(*arguments.floor)
    if arguments.echo:
        return run_echo(*arguments.echo)
    as_is = uvloop.run(measure(arguments.count))
    with awake_cores():
        awake = uvloop.run(measure(arguments.count))
        codec = encodings(arguments.count)
    for title, results in (("as the machine is", as_is), ("with the cores awake", awake)):
        print(f"{title + ', µs':32} {'p50':>8} {'p90':>8} {'p99':>8}")
        for name, figures in results.items():
            print(f"  {name:30} {figures['p50']:8} {figures['p90']:8} {figures['p99']:8}")
    print(
        "encodings of 64 rows, µs", *(f"  {name:30} {figure:8}" for name, figure in codec.items()), sep="\n"
    )
    record(
        "ring",
        {"unit": "µs", "round_trips": arguments.count, "as_is": as_is, "awake": awake, "encodings": codec},
    )


if __name__ == "__main__":
    main()
