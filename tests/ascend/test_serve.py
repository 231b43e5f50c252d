"""The whole runtime on simulated NPUs: real ranks and rings, HCCL between two of them, the server with the
openai client."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from runtime import Engine
from runtime.errors import StartError
from tests.e2e.conftest import Generate, checkpoint, reference
from tests.e2e.serving import serve
from tests.e2e.test_exact import COUNT, run_all
from tests.metrics.read import sample
from tests.models.make import make_checkpoint
from tests.models.reference import Reference

__all__ = ["checkpoint", "reference"]  # fixtures
pytestmark = [pytest.mark.ascend, pytest.mark.lenient, pytest.mark.usefixtures("forked_children")]

SHARED = [i * 37 % 250 for i in range(200)]
PROMPTS = [[*SHARED, 60, 61], [*SHARED, 70], list(range(100, 105)), [*SHARED[:140], 7, 8, 9], [5]]
OPTIONS: dict[str, Any] = {
    "device": "npu",
    "dtype": "float32",
    "num_threads": 1,
    "context_length": 512,
    "max_total_tokens": 2048,
    "chunked_prefill_size": 512,
    "max_running_requests": 16,
}  # which a start tries
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 50, few pages: sequences give way": {"chunked_prefill_size": 50, "max_total_tokens": 640},
    "pages of 256, one step in flight": {"page_size": 256, "disable_overlap_schedule": True},
    "two ranks": {"tensor_parallel_size": 2, "base_gpu_id": 1, "gpu_id_step": 2},
    "no prefix cache, chunks by what decodes": {
        "disable_radix_cache": True,
        "enable_dynamic_chunking": True,
        "prefill_max_requests": 1,
        "max_prefill_tokens": 128,
        "schedule_policy": "lpm",
    },
}


@pytest.mark.anyio
@pytest.mark.parametrize("setting", SETTINGS)
async def test_tokens_are_those_of_transformers(
    setting: str, checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    expected = [reference("qwen3", prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(checkpoint("qwen3")), **(OPTIONS | SETTINGS[setting])) as engine:
        assert await run_all(engine, PROMPTS) == expected
        assert await run_all(engine, PROMPTS) == expected, (
            "with what the first round left in the prefix cache"
        )
        is_cold = "256" in setting or "no prefix" in setting  # no prompt fills a page of 256
        assert (b"runtime_cached_tokens_total 0\n" in engine.metrics()) == is_cold


GRAPHS: dict[str, dict[str, Any]] = {
    "chunks between decodes": {"chunked_prefill_size": 50},
    "few pages: sequences give way": {"max_total_tokens": 640},
    "exact sizes": {"disable_cuda_graph_padding": True},
    "two ranks, weights on their way": {"tensor_parallel_size": 2, "npu_prefetch_mb": 1},
    "none": {"disable_cuda_graph": True, "cuda_graph_bs": "auto"},
}


@pytest.mark.anyio
@pytest.mark.parametrize("setting", GRAPHS)
async def test_graphs_change_no_token(
    setting: str, checkpoint: Callable[[str], Path], reference: Generate
) -> None:
    expected = [reference("qwen3", prompt, COUNT) for prompt in PROMPTS]
    async with Engine(
        model_path=str(checkpoint("qwen3")), **(OPTIONS | {"cuda_graph_bs": (2, 4, 5)} | GRAPHS[setting])
    ) as engine:
        with anyio.fail_after(120):
            while sample(engine.metrics(), "runtime_captured_sizes") < 3 and setting != "none":
                await anyio.sleep(0.05)
        for _ in range(2):
            assert await run_all(engine, PROMPTS) == expected
        assert sample(engine.metrics(), "runtime_captured_sizes") == (0 if setting == "none" else 3)
        assert sample(engine.metrics(), "runtime_capture_failures_total") == 0


LATENT = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "overrides", "options"),
    [
        ("qwen3_moe", {}, {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
        ("deepseek_v2", LATENT, {"chunked_prefill_size": 50, "max_total_tokens": 640}),
        (
            "deepseek_v3",
            LATENT,
            {
                "tensor_parallel_size": 2,
                "expert_parallel_size": 2,
                "disable_cuda_graph": True,
                "npu_nz_cache": True,
                "npu_multi_stream": True,
            },
        ),
    ],
)
async def test_experts_and_latents(
    family: str, overrides: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path, **overrides)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    async with Engine(model_path=str(folder), **(OPTIONS | options)) as engine:
        assert await run_all(engine, PROMPTS) == expected
        assert await run_all(engine, PROMPTS) == expected, (
            "with what the first round left in the prefix cache"
        )


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "overrides", "options"),
    [("qwen3_moe", {}, {}), ("deepseek_v3", LATENT, {"npu_gather_after_q": True})],
)
async def test_tokens_travel_to_experts(
    family: str, overrides: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Counted in prompts, in graphs of fixed shapes in decodes; float32 is beyond CANN's own operators, which
    all_to_all_rank.py tries."""
    folder = make_checkpoint(family, tmp_path, **overrides)
    reference = Reference(folder)
    expected = [reference.greedy(prompt, COUNT) for prompt in PROMPTS]
    async with Engine(
        model_path=str(folder),
        tensor_parallel_size=2,
        moe_a2a_backend="deepep",
        cuda_graph_bs=(2, 4),
        **(OPTIONS | {"chunked_prefill_size": 50} | options),
    ) as engine:
        for _ in range(2):
            assert await run_all(engine, PROMPTS) == expected


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "overrides", "host"),
    [
        ("qwen3", {}, {}),
        (
            "qwen3",
            {},
            {
                "hicache_io_backend": "kernel_ascend",
                "hicache_mem_layout": "page_first_direct",
                "hicache_write_policy": "write_back",
            },
        ),
        ("deepseek_v3", LATENT, {"npu_nz_cache": True}),
    ],
    ids=["layer first", "page first", "latents in NZ"],
)
async def test_prompts_come_back_from_host_memory(
    family: str, overrides: dict[str, Any], host: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path, **overrides)
    reference = Reference(folder)
    prompts = [[first, *SHARED, *SHARED] for first in (1, 2, 3)]
    expected = [reference.greedy(prompt, COUNT) for prompt in prompts]
    async with Engine(
        model_path=str(folder),
        enable_hierarchical_cache=True,
        hicache_ratio=3.0,
        **host,
        **(OPTIONS | {"max_total_tokens": 512}),
    ) as engine:
        for _ in range(2):
            assert [(await run_all(engine, [prompt]))[0] for prompt in prompts] == expected
        assert sample(engine.metrics(), "runtime_host_loaded_tokens_total") > 0


def test_the_openai_client_is_answered() -> None:
    options = ("--dtype", "float32", "--max-total-tokens", "4096", "--chunked-prefill-size", "512")
    with serve("--device", "npu", *options) as npu, serve("--device", "cpu", *options) as cpu:
        texts = [
            [
                chunk.choices[0].delta.content or ""
                for chunk in server.client.chat.completions.create(
                    model="pocket",
                    messages=[{"role": "user", "content": "Tell me of the fox."}],
                    max_tokens=20,
                    temperature=0,
                    stream=True,
                )
            ]
            for server in (npu, cpu)
        ]
        assert "".join(texts[0]) == "".join(texts[1]) != ""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({"SIM_NPU_COUNT": "0"}, {}, "finds no NPU"),
        ({}, {"base_gpu_id": 100}, "NPU 100 .*and there are"),
        ({"SIM_NPU_STRICT": "1"}, {}, "does not work in float32.*--dtype bfloat16"),
        ({"PYTHONPATH": ""}, {}, "torch_npu cannot be loaded"),  # without the simulation, as without CANN
    ],
)
async def test_a_start_that_cannot_be_is_reported(
    environment: dict[str, str], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        assert name == "SIM_NPU_STRICT" or name in os.environ
        monkeypatch.setenv(name, value)
    with pytest.raises(StartError, match=message):
        async with Engine(**(OPTIONS | options)):
            pass


def test_ranks_that_do_not_meet_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_npu

    from runtime.devices.ascend import collectives
    from runtime.devices.rendezvous import Rendezvous

    assert torch_npu

    def alone(*_: Any, **__: Any) -> None:
        raise torch.distributed.DistStoreError("Timed out waiting for 1 of 2\nand more")

    monkeypatch.setattr(Rendezvous, "meet", lambda _: None)
    monkeypatch.setattr(collectives.dist, "init_process_group", alone)
    with pytest.raises(
        StartError, match=r"HCCL does not link rank 0 .*\(Timed out waiting for 1 of 2\).*HCCL_SOCKET_IFNAME"
    ):
        collectives.HcclCollectives(0, 2, str(tmp_path / "store"), torch.device("npu", 0))
