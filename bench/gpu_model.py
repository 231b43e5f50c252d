"""A rank with a published model's shape and random weights, driven without the rest of the runtime: what
bench/gpu.py and bench/gpu_idle.py measure.

Steps are launched one ahead of the results, as the scheduler does. Keys and values are whatever the pages
hold: their numbers do not change the time of a step.
"""

import gc
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace as replace_struct

from bench.shapes import SHAPES
from runtime.devices.base import Device
from runtime.devices.executor import Pending
from runtime.devices.progress import without_progress
from runtime.messages.ranks import CompileConfig, DeviceOption, StartRank
from runtime.messages.steps import Admit, SlotSampling, StepPlan
from runtime.models.config.model_config import ModelConfig, read_config
from runtime.ranks.open_executor import open_executor
from runtime.ranks.start import start_torch_rank
from runtime.ranks.torch_executor import TorchExecutor

PAGE = 64
NOTHING = np.empty(0, np.int32)
GREEDY = SlotSampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    seed=0,
    bias_ids=[],
    bias_values=[],
    stop_ids=[],
    min_len=0,
    top_logprobs=-1,
    prompt_logprobs=-1,
)
RANDOM = replace_struct(GREEDY, temperature=1.0, top_p=0.95)
DRY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


@contextmanager
def folder_of(shape: str, *, is_dry: bool) -> Iterator[Path]:
    """A model folder with nothing but the config; tiny when dry."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(DRY if is_dry else SHAPES[shape]))
        yield Path(folder)


def dry_executor(message: StartRank) -> TorchExecutor:
    """A rank of the cpu with the GPU's kernels, interpreted."""
    from runtime.devices.cpu.device import open_device
    from runtime.devices.cpu.facts import FACTS
    from runtime.devices.cuda.fused import CudaFusedOps
    from runtime.devices.cuda.kernels.launch import INTERPRETER
    from runtime.devices.cuda.ops import CudaOps, SplitCounters
    from runtime.devices.cuda.options import CudaOptions
    from runtime.devices.options import read_options

    def opened(start: StartRank, rank: int, dtype: torch.dtype) -> Device:
        device = open_device(replace_struct(start, device_options={}), rank, dtype)
        options = read_options(message, CudaOptions)
        counters = SplitCounters.of(
            options.kernel_fusion, INTERPRETER, device.torch_device, lists=options.lists_work
        )
        ops = CudaOps(
            dtype, INTERPRETER, fusion=options.kernel_fusion, counters=counters, gemv_rows=options.gemv_rows
        )
        return replace(device, ops=ops, fused=CudaFusedOps(ops), programs=None)

    return TorchExecutor(start_torch_rank(0, message, without_progress, opened, FACTS))


@dataclass
class Model:
    """A rank that has started."""

    runner: Any
    config: ModelConfig
    weights_bytes: int
    kv_bytes: int  # of a token's keys and values in all layers
    start_s: float
    is_dry: bool
    step: int = 0

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        slots: int,
        longest: int,
        tokens: int,
        step_tokens: int,
        is_dry: bool,
        piecewise_tokens: Sequence[int] = (),
        compiled: CompileConfig | None = None,
        device: str = "cuda",
        quantization: str | None = None,
        dtype: str = "bfloat16",
        kv_dtype: str = "auto",
        graph_sizes: Sequence[int] | None = None,
        device_options: dict[str, DeviceOption] | None = None,
    ) -> "Model":
        """Starts a rank. `tokens`: the tokens of all pages; `piecewise_tokens`: sizes of steps that may be
        captured in piecewise graphs; `graph_sizes`: of decode steps that may be, None: one of all slots;
        `device_options`: of CudaOptions, None: its defaults."""
        begin = perf_counter()
        message = StartRank(
            device=device,
            model_path=str(folder),
            dtype="float32" if is_dry else dtype,
            load_format="dummy",
            tp_size=1,
            page_size=PAGE,
            max_slots=slots,
            max_len=longest,
            max_step_tokens=step_tokens,
            memory_fraction=0.95,
            max_total_tokens=tokens,
            num_threads=None,
            rendezvous="",
            seed=0,
            quantization=quantization,
            kv_dtype="auto" if is_dry else kv_dtype,
            graph_sizes=[] if is_dry or device == "cpu" else list(graph_sizes or [slots]),
            piecewise_sizes=[] if is_dry else list(piecewise_tokens),
            compiled=compiled or CompileConfig(),
            device_options=device_options or {},
        )
        executor = dry_executor(message) if is_dry else open_executor(0, message, without_progress)
        ready = executor.ready
        if (ready.num_pages - 1) * PAGE < tokens // PAGE * PAGE:
            raise RuntimeError(
                f"there is memory for {ready.num_pages} pages, and {tokens} tokens were to fit"
            )
        return cls(
            executor,
            read_config(folder),
            ready.weights_bytes,
            ready.pages_bytes // (ready.num_pages * PAGE),
            perf_counter() - begin,
            is_dry,
        )

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of embeddings, which decode steps read only where it is the head."""
        return 0 if self.config.is_tied else self.config.vocab_size * self.config.hidden_size * 2

    @property
    def expert_weights(self) -> int:
        """Numbers of weights of all experts."""
        moe = self.config.moe
        if moe is None:
            return 0
        of_layer = moe.num_experts * 3 * self.config.hidden_size * moe.intermediate_size
        return sum(moe.layers) * of_layer

    def read_bytes(self, rows: int, weight_bits: int = 16) -> float:
        """Bytes of weights that a decode step reads: of experts, whose weights have `weight_bits`, those of
        the expected number that `rows` random choices reach."""
        read = float(self.weights_bytes - self.table_bytes)
        if (moe := self.config.moe) is not None:
            read -= self.expert_weights * weight_bits / 8 * (1 - moe.routing.top_k / moe.num_experts) ** rows
        return read

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt, without the head: products with weights in 16 bits, those of a token's
        experts, and causal attention."""
        config, moe = self.config, self.config.moe
        tables = config.vocab_size * config.hidden_size * (1 if config.is_tied else 2)
        weights = self.weights_bytes / 2 - tables
        if moe is not None:
            weights -= self.expert_weights * (1 - moe.routing.top_k / moe.num_experts)
        attention = 2.0 * tokens * tokens * config.num_heads * config.head_dim * config.num_layers
        return 2.0 * weights * tokens + attention

    def capture(self, size: int, unit: str = "sequences") -> float:
        """Seconds; 0 when dry."""
        if self.is_dry:
            return 0.0
        captured = self.runner.capture(size, unit)
        if captured.error:
            raise RuntimeError(f"no graph of {size} {unit}: {captured.error}")
        return float(captured.seconds)

    def begin(self, lengths: Sequence[int], room: int, sampling: SlotSampling = GREEDY) -> None:
        """Sequences that are so many tokens long, with pages for `room` more; their last token is known."""
        rows, pages = len(lengths), [-(-(length + room) // PAGE) for length in lengths]
        slots = np.arange(rows, dtype=np.int32)
        ids = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32) + 1
        ones = np.ones(rows, np.int32)
        self.launch(
            StepPlan(
                step=self.next_step(),
                num_decodes=0,
                admits=[
                    Admit(slot, sampling, length, NOTHING, length=length - 1)
                    for slot, length in enumerate(lengths)
                ],
                slots=slots,
                counts=ones,
                samples=ones.astype(np.uint8),
                token_ids=ones,
                page_slots=np.repeat(slots, pages),
                page_rows=np.concatenate([np.arange(count, dtype=np.int32) for count in pages]),
                page_ids=ids,
            )
        ).result()

    def decode(self, rows: int, steps: int) -> float:
        """Seconds of a step, each launched before the result of the one before was read; the median of the
        later half."""
        slots, ones, times = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32), []
        before: Pending | None = None
        for _ in range(steps):
            step = self.launch(
                StepPlan(
                    step=self.next_step(),
                    num_decodes=rows,
                    slots=slots,
                    counts=ones,
                    samples=ones.astype(np.uint8),
                )
            )
            if before is not None:
                before.result()
            times.append(perf_counter())
            before = step
        if before is not None:
            before.result()
        return median(np.diff(times[steps // 2 :]).tolist())

    def prefill(self, tokens: int, times: int, decodes: int = 0) -> float:
        """Seconds from launch to result of a prompt, the median; in a step with the first `decodes`
        sequences, whose slots the prompt's follows."""
        pages = -(-tokens // PAGE)
        counts, found = np.array([1] * decodes + [tokens], np.int32), []
        for _ in range(times):
            begin = perf_counter()
            self.launch(
                StepPlan(
                    step=self.next_step(),
                    num_decodes=decodes,
                    admits=[Admit(decodes, GREEDY, tokens, NOTHING)],
                    slots=np.arange(decodes + 1, dtype=np.int32),
                    counts=counts,
                    samples=np.ones(decodes + 1, np.uint8),
                    token_ids=np.arange(tokens, dtype=np.int32) % 200,
                    page_slots=np.full(pages, decodes, np.int32),
                    page_rows=np.arange(pages, dtype=np.int32),
                    page_ids=np.arange(pages, dtype=np.int32) + 1,
                )
            ).result()
            found.append(perf_counter() - begin)
        return median(found)

    def launch(self, plan: StepPlan) -> Pending:
        """Launches a step."""
        return self.runner.launch(plan)

    def next_step(self) -> int:
        """The number of the next step."""
        self.step += 1
        return self.step

    def close(self) -> None:
        """Closes the rank and frees its memory."""
        self.runner.close()
        gc.unfreeze()  # a rank freezes what its start has made
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def pages_for(rows: int, length: int, room: int) -> int:
    """Tokens that the pages of `rows` sequences hold."""
    return rows * math.ceil((length + room) / PAGE) * PAGE
