"""The columns of the table of splits: what each runs for a split, and how it can fail.

A check is given a Bench and a split's options. It returns whether anything was run; it raises Refused for
what a start refuses, and AssertionError, or whatever a rank raises, for what should work and does not.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from runtime import Engine
from runtime.errors import StartError
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.server import check as check_start
from tests.devices.cpu.ranks import RankProcesses
from tests.devices.cpu.tp_rank import PROMPTS as PROMPTS_OF_RANKS
from tests.e2e.node_of import SECRET, options_of, several_nodes
from tests.models.compare import Expected, expected_of
from tests.models.make import make_checkpoint
from tests.models.matrix_checks import Refused
from tests.splits.splits import FAMILIES, Options, num_ranks

COUNT = 12  # tokens of each answer
SHARED = list(range(10, 30))  # tokens that prompts begin with
PROMPTS = [SHARED + [60, 61], SHARED + [70], list(range(100, 135)), [7] * 9, [5], [200, 100]]
OPTIONS: Options = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 96,
    "page_size": 4,
    "chunked_prefill_size": 16,
    "random_seed": 1,
    "max_running_requests": 4,  # fewer than prompts: some wait
    "standby_ranks": 0,
}
NULL: Options = {"device": "null", "max_total_tokens": 4096, "random_seed": 1, "standby_ranks": 0}
NPU: Options = OPTIONS | {"device": "npu", "page_size": 128, "context_length": 512, "max_total_tokens": 2048}
# what ranks import that takes long
MODULES = ("runtime.ranks.torch_executor", "runtime.devices.cpu.device")
NUM_NPUS = 8  # that the simulation has


class Bench:
    """A folder with the checkpoints of the columns, each made when it is first asked for."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._made: dict[str, Expected] = {}
        self.ranks = RankProcesses()

    def expected(self, column: str) -> Expected:
        """The checkpoint of a column of FAMILIES, and what transformers makes of PROMPTS."""
        if column not in self._made:
            family, sizes = FAMILIES[column]
            folder = make_checkpoint(family, self.work / family, **sizes)
            self._made[column] = expected_of(folder, PROMPTS, COUNT)
        return self._made[column]

    def close(self) -> None:
        """Ends the ranks that were started."""
        self.ranks.close()


def check(options: Options) -> None:
    """What a server checks before it acts. Raises Refused."""
    try:
        check_start(plan_for(from_values(options | {"port": 0})))
    except StartError as error:
        text = str(error).replace(str(options.get("model_path")), "the model")
        raise Refused("; ".join(" ".join(line.split()) for line in text.splitlines())) from None


@asynccontextmanager
async def started(options: Options) -> AsyncIterator[Engine]:
    """An engine with these options, on as many nodes as they say. Raises Refused."""
    if options.get("nnodes", 1) > 1:
        options = options_of(**({"tensor_parallel_size": 1} | options))
    check(options)
    if "nnodes" not in options:
        async with Engine(**options) as engine:
            yield engine
    else:
        async with several_nodes(options) as (engine, _):
            yield engine


async def answers(engine: Engine) -> list[list[int]]:
    """Tokens of all prompts, asked for at once; the i-th has the seed i."""
    found: list[list[int]] = [[] for _ in PROMPTS]

    async def ask(i: int) -> None:
        answer = await engine.generate(
            PROMPTS[i], temperature=0, seed=i, ignore_eos=True, max_new_tokens=COUNT
        )
        found[i] = answer.token_ids

    async with anyio.create_task_group() as tasks:
        for i in range(len(PROMPTS)):
            tasks.start_soon(ask, i)
    return found


async def compare(options: Options, expected: list[list[int]]) -> None:
    """Twice the answers of a split, the second time with what the first one left in the prefix cache."""
    async with started(options) as engine:
        replicas = engine._core.replicas
        assert len(replicas) == options.get("data_parallel_size", 1)
        pids = [replica.supervisor.ranks.pids for replica in replicas.owners]
        assert sum(map(len, pids)) == num_ranks(options) // options.get("nnodes", 1)
        for _ in range(2):
            assert await answers(engine) == expected


def run(options: Options, expected: list[list[int]]) -> bool:
    """Compares the answers of a split, in an event loop of its own."""
    os.environ["RUNTIME_DIST_SECRET"] = SECRET.decode()
    try:
        anyio.run(compare, options, expected, backend_options={"use_uvloop": True})
    except BaseExceptionGroup as group:
        refused, others = group.split(Refused)
        if others is not None or refused is None:
            raise
        raise Refused(str(_first(refused))) from None
    finally:
        del os.environ["RUNTIME_DIST_SECRET"]
    return True


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    first: BaseException = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def on_cpu(column: str, bench: Bench, split: Options) -> bool:
    """Tokens of transformers through the whole runtime, on the cpu device."""
    made = bench.expected(column)
    return run(OPTIONS | split | {"model_path": str(made.folder)}, made.tokens)


def on_null(bench: Bench, split: Options) -> bool:
    """What the null device says, which computes nothing: scheduler, rings and links alone."""
    expected = [[97 + (i + len(prompt) + n) % 26 for n in range(COUNT)] for i, prompt in enumerate(PROMPTS)]
    return run(NULL | split, expected)


def in_graphs(bench: Bench, split: Options) -> bool:
    """Captured decode steps and pieces of prompts, on the double of a device with graphs: ranks without a
    scheduler, of splits whose steps are captured."""
    sizes = {"tensor_parallel_size", "expert_parallel_size", "moe_a2a_backend"}
    if not split or not split.keys() <= sizes:
        return False
    made, size = bench.expected("Qwen3-MoE"), split["tensor_parallel_size"]
    mode = "low_latency" if "moe_a2a_backend" in split else "none"
    groups = size if mode != "none" else split.get("expert_parallel_size", 1)
    check({"model_path": str(made.folder), "device": "cuda"} | split)
    folder = bench.work / f"graphs-{size}-{groups}-{mode}"
    folder.mkdir()
    ranks = bench.ranks.run(size, [made.folder], folder, groups, "taped", mode)
    for prompt, tokens in zip(PROMPTS_OF_RANKS[:2], ranks[0][0]["tokens"], strict=False):
        found = tokens[len(prompt) :]
        assert len(found) > 8 and found == made.reference.greedy(prompt, len(found))
    assert all(rank[0]["last"] == ranks[0][0]["last"] for rank in ranks)
    return True


def on_npu(bench: Bench, split: Options) -> bool:
    """Tokens of transformers on simulated NPUs (tests/ascend/simulate.py)."""
    if "SIM_CANN_LIBRARIES" not in os.environ or num_ranks(split) > NUM_NPUS:
        return False
    made = bench.expected("Qwen3-MoE")
    return run(NPU | split | {"model_path": str(made.folder)}, made.tokens)


Check = Callable[[Bench, Options], bool]
CPU: dict[str, Check] = {column: partial(on_cpu, column) for column in FAMILIES}
CHECKS: dict[str, Check] = CPU | {"null": on_null, "graphs": in_graphs, "npu": on_npu}
