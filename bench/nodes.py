"""What a second node costs on loopback: the time that a message takes longer to and from a rank of node 1
than to and from one of node 0, and the CPU time of a step on both, in turns with two ranks on one node. On
the null device, whose steps take no time: all of it is the runtime's.

    python -m bench.nodes [--rounds 10]
"""

import argparse
import asyncio
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

import anyio
import numpy as np
import uvloop

from bench.record import record
from runtime.actors.nodes import Nodes, open_nodes
from runtime.actors.ranks import Ranks
from runtime.messages.memory import ChangeMemory, MemoryReport
from runtime.messages.steps import StepPlan
from runtime.nodes.secret import VARIABLE
from runtime.options.parse import from_values
from runtime.options.plan import Plan
from runtime.options.resolve import plan_for
from runtime.settings import model_config, start_rank

ROWS, STEPS, PINGS = 64, 500, 200  # of each round
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def plan_of(step: int) -> StepPlan:
    """A decode of ROWS sequences."""
    ones = np.ones(ROWS, np.int32)
    return StepPlan(
        step=step,
        num_decodes=ROWS,
        slots=np.arange(ROWS, dtype=np.int32),
        counts=ones,
        samples=ones.astype(np.uint8),
        token_ids=np.zeros(0, np.int32),
    )


class Measured:
    """Ranks of one or two nodes, and their figures."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.step = 0
        self.cpu_us: list[float] = []  # of the event loop, for a step
        self.wall_us: list[float] = []  # of a step, until the result of rank 0
        self.relay_us: list[float] = []  # of a message to rank 1 and its answer, beyond rank 0's
        self._woken = asyncio.Event()
        self._arrivals: dict[int, float] = {}
        self._both = asyncio.Event()
        ranks.set_wake(self._woken.set)
        ranks.memory_reports.add = self._arrive  # type: ignore[method-assign]

    async def steps(self) -> None:
        """A round of steps, one after the other."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        for _ in range(STEPS):
            self.step += 1
            self.ranks.submit(plan_of(self.step))
            while not self.ranks.results():
                await self._woken.wait()
                self._woken.clear()
        self.cpu_us.append((time.process_time() - cpu_s) / STEPS * 1e6)
        self.wall_us.append((time.perf_counter() - wall_s) / STEPS * 1e6)

    async def pings(self) -> None:
        """A round of commands that each rank answers at once."""
        for _ in range(PINGS):
            self._arrivals.clear()
            self._both.clear()
            self.ranks.submit(ChangeMemory(0, ()))
            await self._both.wait()
            self.relay_us.append((self._arrivals[1] - self._arrivals[0]) * 1e6)
            await anyio.sleep(0.001)

    def _arrive(self, report: MemoryReport) -> None:
        self._arrivals[report.rank] = time.perf_counter()
        if len(self._arrivals) == 2:
            self._both.set()


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, as proc(5) has it."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


async def measure(rounds: int) -> None:
    """Prints and records the figures."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    os.environ[VARIABLE] = secrets.token_hex(32)
    one = {"device": "null", "tensor_parallel_size": 2}
    two = {**one, "nnodes": 2, "dist_init_addr": address}
    words = ["--device", "null", "--tp", "2", "--nnodes", "2", "--dist-init-addr", address]
    node = subprocess.Popen([sys.executable, "-m", "runtime", "serve", *words, "--node-rank", "1"])
    plans = [plan_for(from_values(options)) for options in (one, two)]
    nodes = open_nodes(plans[1])
    assert nodes is not None, "two nodes"
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(nodes.run, plans[1])
            local, remote = [Measured(await started(plan, nodes)) for plan in plans]
            for each in (local, remote) * 2:  # warm-up
                await each.steps()
                await each.pings()
            for each in (local, remote):
                each.cpu_us, each.wall_us, each.relay_us = [], [], []
            node_us = []
            for _ in range(rounds):
                await local.steps()
                begin = cpu_s(node.pid)
                await remote.steps()
                node_us.append((cpu_s(node.pid) - begin) / STEPS * 1e6)
                await local.pings()
                await remote.pings()
            report(local, remote, sum(node_us) / rounds)
            for each in (local, remote):
                await each.ranks.stop()
            nodes.close(is_failure=False)
            tasks.cancel_scope.cancel()
    finally:
        node.terminate()
        node.wait()


async def started(plan: Plan, nodes: Nodes) -> Ranks:
    """Ranks that take steps."""
    start = start_rank(plan, model_config(plan))
    ranks = Ranks(start, nodes=nodes.of(0) if plan.parallel.nnodes > 1 else None)
    await ranks.start(lambda progress: None)
    return ranks


def report(local: Measured, remote: Measured, node_us: float) -> None:
    """Prints and records the figures."""
    ways = [(there - median(local.relay_us)) / 2 for there in remote.relay_us]
    figures = {
        "relay_us": round(median(ways), 1),
        "relay_p10_us": round(quantiles(ways, n=10)[0], 1),
        "relay_p90_us": round(quantiles(ways, n=10)[8], 1),
        "loop_cpu_us": [round(median(each.cpu_us), 1) for each in (local, remote)],
        "step_wall_us": [round(median(each.wall_us), 1) for each in (local, remote)],
        "node_cpu_us": round(node_us, 1),
    }
    print(f"one way to a rank of node 1, beyond one of node 0: {figures['relay_us']} us, ", end="")
    print(f"10th and 90th percentile {figures['relay_p10_us']} and {figures['relay_p90_us']} us")
    for i, name in enumerate(("one node", "two nodes")):
        cpu, wall = figures["loop_cpu_us"][i], figures["step_wall_us"][i]
        print(f"{name}: {cpu} us CPU of the event loop for a step of {ROWS} rows, {wall} us wall")
    print(f"node 1: {figures['node_cpu_us']} us CPU for a step, its rank not counted")
    record("nodes", figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    uvloop.run(measure(parser.parse_args().rounds))
