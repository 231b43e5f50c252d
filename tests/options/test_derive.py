"""What "auto" stands for: pure functions of facts."""

import pytest
from msgspec import structs

from runtime.models.config.diffusion_families import BlockDiffusion
from runtime.models.config.moe_config import MoeConfig
from runtime.options.declare import Derived
from runtime.options.facts import DEVICES, MachineFacts
from runtime.options.groups import experts, graphs, http, kernels, memory, null, parallel, precision, schedule
from runtime.options.groups import model as model_options

CPU = DEVICES["cpu"]


class Model:
    context_len, dtype, vocab_size, num_heads, num_kv_heads, pooling = 4096, "bfloat16", 1000, 8, 4, None
    windows = (0, 1024)
    moe: MoeConfig | None = None
    mla = None
    diffusion: BlockDiffusion | None = None


class Blocks(Model):
    diffusion = BlockDiffusion(block_size=24, mask_id=5)


class Untyped(Model):
    dtype = None


class Odd(Model):
    dtype = "float8"


def machine(cores: int) -> MachineFacts:
    return MachineFacts(cores=cores, memory_bytes=2**30, entropy=7)


@pytest.mark.parametrize(
    ("derived", "value", "reason"),
    [
        (precision.dtype(Model, CPU), "bfloat16", "checkpoint"),
        (precision.dtype(Untyped, CPU), "auto", "names none"),
        (precision.dtype(Odd, CPU), "float32", "cpu has no float8"),
        (model_options.context_length(Model), 4096, "config.json"),
        (parallel.num_threads(machine(2), 1, 1, 1), 2, "2 cores for 1 rank"),
        (parallel.num_threads(machine(8), 1, 1, 1), 7, "one left"),
        (parallel.num_threads(machine(8), 2, 1, 1), 3, "one left"),
        (parallel.num_threads(machine(1), 2, 1, 2), 1, "1 cores for 4 ranks"),
        (schedule.max_step_tokens(512, 16384, 4096, CPU, Model), 512, "smaller"),
        (schedule.max_step_tokens(512, 100, 4096, CPU, Model), 100, "smaller"),
        (schedule.max_step_tokens(-1, 100, 4096, CPU, Model), 4096, "without chunks"),
        (schedule.max_step_tokens(0, 10000, 4096, CPU, Model), 10000, "without chunks"),
        (schedule.max_step_ms(512, CPU), 200.0, "as fast as one reads"),
        (schedule.max_step_ms(-1, CPU), 0.0, "not split"),
        (schedule.max_step_ms(512, DEVICES["null"]), 0.0, "is short"),
        (memory.page_size(CPU, Model), 16, "kernels of cpu"),
        (memory.page_size(CPU, Blocks), 48, "whole blocks of 24"),
        (schedule.random_seed(machine(1)), 7, "drawn"),
        (parallel.num_ranks(4, 2), 8, "one process"),
        (graphs.cuda_graph_max_bs(CPU, 64, False, False, "triton", 1), 0, "captures no graphs"),
        (graphs.cuda_graph_max_bs(CPU, 64, True, True, "triton", 1), 0, "--disable-cuda-graph"),
        (graphs.cuda_graph_max_bs(CPU, 64, False, False, "triton", 2), 0, "between its stages"),
        (
            graphs.cuda_graph_max_bs(CPU, 64, False, True, "triton", 1),
            0,
            "--deepep-mode normal counts tokens on the host",
        ),
        (experts.expert_parallel_aliases("deepep", 8)[1], 8, "over all ranks"),
        (graphs.cuda_graph_bs(0), (), "no graphs"),
        (kernels.attention_backend(CPU), "torch_native", "cpu"),
        (null.null_vocab_size(Model), 1000, "vocabulary"),
        (http.max_total_body_bytes(16 * 2**20), 2**29, "32 of --max-body-bytes"),
        (http.max_total_body_bytes(2**30), 2**31, "two of --max-body-bytes"),
        (http.max_connections(1024, 2), 640, "1024 files"),
        (http.max_connections(64, 1), 32, "64 files"),
        (http.max_connections(65_536, 8), 8192, "200 KiB"),
        (http.allowed_hosts("127.0.0.1", False), ("localhost", "127.0.0.1"), "without keys"),
        (http.allowed_hosts("localhost", False), ("localhost",), "without keys"),
        (http.allowed_hosts("localhost", True), ("*",), "key"),
        (http.allowed_hosts("0.0.0.0", False), ("*",), "other machines"),
    ],
)
def test_values_and_reasons(derived: Derived, value: object, reason: str) -> None:
    assert derived.value == value and reason in derived.reason


@pytest.mark.parametrize(
    ("graph_max", "running", "sizes"), [(8, 64, (1, 2, 4, 8)), (64, 20, (1, 2, 4, 8, 16, 20)), (1, 64, (1,))]
)
def test_sizes_of_graphs(graph_max: int, running: int, sizes: tuple[int, ...]) -> None:
    device = structs.replace(CPU, graph_max_running=graph_max)
    assert (
        graphs.cuda_graph_bs(graphs.cuda_graph_max_bs(device, running, False, False, "triton", 1).value).value
        == sizes
    )


def test_graphs_waste_little() -> None:
    """A step of n sequences runs in the next larger graph: never more than twice as large, and at most an
    eighth above from 64 on."""
    sizes = graphs.cuda_graph_bs(1024).value
    for n in range(1, 1025):
        size = min(size for size in sizes if size >= n)
        assert size < 2 * n + 1 and (n < 64 or size <= n * 1.125)
