"""The Executor of all torch devices: loads the model, allocates memory, and passes each plan to the model
runner."""

from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from runtime import log
from runtime.cache.pool_sizes import MemoryBudget, Pools, divide_memory, has_two_pools, least_pages
from runtime.devices.base import Device
from runtime.devices.executor import Pending, Progress
from runtime.devices.facts import DeviceFacts
from runtime.devices.host_memory import HostPages, open_host
from runtime.errors import StartError
from runtime.layers.fused_ops import fused_ops_of
from runtime.layers.lora import LoraAdapters
from runtime.layers.sampling.grammar_masks import GrammarMasks
from runtime.layers.sampling.processors import Processors
from runtime.messages.constraint import Grammar
from runtime.messages.lora import LoadAdapter
from runtime.messages.memory import ChangeMemory, MemoryReport, UpdateWeights
from runtime.messages.ranks import Captured, CountExperts, Profile, RankReady, StartRank
from runtime.messages.steps import StepPlan
from runtime.models.base import Model
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.quantization_schemes import require_supported
from runtime.models.loader import resolve_dtype
from runtime.ranks.expert_counts import open_load
from runtime.ranks.memory_saver import MemorySaver, allocate_kv
from runtime.ranks.model_runner import ModelRunner
from runtime.ranks.profile_run import run_largest_step
from runtime.ranks.profiler import Recording
from runtime.ranks.slots import Slots
from runtime.ranks.weights_loader import WeightsLoader, read_model

OpenDevice = Callable[[StartRank, int, torch.dtype], Device]
KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class TorchExecutor:
    """One rank on one torch device."""

    def __init__(self, rank: int, open_device: OpenDevice, facts: DeviceFacts) -> None:
        self.rank = rank
        self.open_device = open_device
        self.facts = facts
        self.loaded: ModelRunner | None = None
        self.memory_saver: MemorySaver | None = None
        self.recording: Recording | None = None
        self.trace_folder = ""  # where traces of captures are written; empty: none are

    def start(self, start: StartRank, progress: Progress) -> RankReady:
        """See Executor.start. Raises StartError, ModelError among them."""
        times = [perf_counter()]
        self.trace_folder = start.trace_folder
        config = read_model(start)
        dtype = resolve_dtype(start.dtype, config, (*self.facts.dtypes, *self.facts.other_dtypes))
        if config.quantization is not None:
            require_supported(config.quantization.schemes, self.facts.schemes, self.facts.name)
        device = self.open_device(start, self.rank, dtype)
        budget = int(device.memory.free_bytes() * start.memory_fraction)
        times.append(perf_counter())
        progress("weights", 0.0)
        loader = WeightsLoader(device, start, config, dtype)
        loaded_model = loader.load(progress)
        model = loaded_model.model
        adapters = open_adapters(device, model, start, config)
        weights_bytes = loaded_model.num_bytes + (adapters.num_bytes if adapters is not None else 0)
        mlps = [layer.mlp for layer in model.layers] if config.moe is not None else []
        experts = open_load(device, mlps, start.expert_steps)
        device.memory.empty_cache()
        times.append(perf_counter())
        progress("pages", 0.0)
        kv_dtype = KV_DTYPES.get(start.kv_dtype, dtype)
        budget -= weights_bytes + (experts.num_bytes if experts is not None else 0)
        num_bytes = min(budget, self.memory_for_pages(device, model, start, config, kv_dtype))
        pools = count_pages(start, config.windows, num_bytes, token_bytes(model, kv_dtype))
        sizes = [pages + 1 for pages in (pools.full, pools.window) if pages]  # with the padding pages
        kv = [
            allocate_kv(device, layer, sizes[layer.pool] * start.page_size, kv_dtype)
            for layer in model.attentions
        ]
        slots = self.open_slots(device, start, config, len(sizes))
        pages_bytes = sum(cache.nbytes for pair in kv for cache in pair)
        host = self.open_host(start, device, kv, sizes, pages_bytes)
        copies = None if host is None else device.memory.open_page_copier(kv, host, start.page_size)
        self.loaded = ModelRunner(
            device,
            model,
            slots,
            kv,
            start.page_size,
            tuple(sorted(set(config.windows))),
            copies,
            config.pooling,
            adapters,
            experts,
        )
        if experts is not None:
            experts.step.zero_()  # counts of the profile run
        for load_adapter in start.adapters.loaded if start.adapters is not None else ():
            self.load_adapter(load_adapter)
        self.memory_saver = MemorySaver(
            self.rank, self.loaded, loader, loaded_model.num_bytes, kv_dtype, sizes, host
        )
        self.memory_saver.open_graphs()
        times.append(perf_counter())
        progress("pages", 1.0)
        phases = dict(zip(("device", "weights", "pages"), np.diff(times).tolist(), strict=True))
        return self.ready(device, sizes, host, weights_bytes, pages_bytes, phases)

    def ready(
        self,
        device: Device,
        sizes: list[int],
        host: HostPages | None,
        weights_bytes: int,
        pages_bytes: int,
        phases: dict[str, float],
    ) -> RankReady:
        """The sizes of everything that was allocated."""
        return RankReady(
            rank=self.rank,
            num_pages=sizes[0],
            num_window_pages=sizes[1] if len(sizes) > 1 else 0,
            weights_bytes=weights_bytes,
            pages_bytes=pages_bytes,
            device_name=self.facts.name,
            phases_s=phases,
            num_host_pages=host.num_pages if host else 0,
            host_page_bytes=host.page_bytes if host else 0,
            host_part_bytes=host.part_bytes if host else (),
            used_bytes=device.memory.used_bytes(),
        )

    def open_slots(self, device: Device, start: StartRank, config: ModelConfig, num_pools: int) -> Slots:
        """State of the slots. Rank 0 alone samples, so it alone has grammars and logits processors."""
        return Slots(
            start.max_slots,
            -(-start.max_len // start.page_size),
            config.vocab_size,
            device.torch_device,
            num_pools,
            GrammarMasks(start.grammar if self.rank == 0 else None, config.vocab_size),
            Processors(start.processors if self.rank == 0 else []),
            fused_ops_of(device).penalise,
        )

    def memory_for_pages(
        self, device: Device, model: Model, start: StartRank, config: ModelConfig, kv_dtype: torch.dtype
    ) -> int:
        """Bytes that pages may take so that there is memory for the largest step as well, if the device can
        measure what that takes."""
        if not model.attentions or config.pooling is not None:
            return device.memory.free_bytes()

        def run() -> None:
            # some operators read pages, so layers of one shape share a cache of the step's size
            num_tokens = -(-start.max_step_tokens // start.page_size) * start.page_size
            forms = {
                (layer.num_kv_heads, layer.key_dim, layer.value_dim): layer for layer in model.attentions
            }
            caches = {form: allocate_kv(device, layer, num_tokens, kv_dtype) for form, layer in forms.items()}
            kv = [caches[layer.num_kv_heads, layer.key_dim, layer.value_dim] for layer in model.attentions]
            slots = Slots(
                start.max_slots, -(-start.max_len // start.page_size), config.vocab_size, device.torch_device
            )
            run_largest_step(
                ModelRunner(
                    device, model, slots, kv, start.page_size, tuple(sorted(set(config.windows))), None, None
                ),
                start,
            )

        return device.memory.free_bytes() - device.memory.measure_peak(run)

    def open_host(
        self,
        start: StartRank,
        device: Device,
        kv: list[tuple[Tensor, Tensor]],
        sizes: list[int],
        cache_bytes: int,
    ) -> HostPages | None:
        """This rank's host memory; None without a host tier. Raises StartError."""
        if len(sizes) > 1 and (start.host_bytes or start.host_ratio):
            raise StartError(
                "--enable-hierarchical-cache copies pages of all layers, and here sliding-window layers "
                "have pages of their "
                "own; add --disable-hybrid-swa-memory"
            )
        parts = tuple(cache[: start.page_size].nbytes for pair in kv for cache in pair)
        return open_host(start, self.rank, sizes[0] - 1, parts, device.memory.free_host_bytes(cache_bytes))

    def launch(self, plan: StepPlan) -> Pending:
        """See Executor.launch. A step for which there is no memory is tried again when unused memory has been
        returned, if that is still possible."""
        assert self.loaded is not None, "a step before start"
        with torch.inference_mode():
            try:
                return self.loaded.launch(plan)
            except torch.OutOfMemoryError:
                if self.loaded.sampled_step == plan.step or self.loaded.device.collectives.size > 1:
                    raise  # tokens were sampled already, or other ranks wait in a collective
                log.get("ranks").warning(
                    "no memory for a step; unused memory is freed, and it is launched again",
                    step=plan.step,
                    exc_info=True,
                )
            self.loaded.device.memory.empty_cache()
            if self.loaded.load is not None:
                self.loaded.load.step.zero_()  # counts of the failed launch
            return self.loaded.launch(plan)

    def capture(self, size: int, unit: str = "sequences") -> Captured:
        """See Executor.capture."""
        assert self.loaded is not None, "a capture before start"
        graphs = self.loaded.graphs if unit == "sequences" else self.loaded.piecewise
        if graphs is None:
            return Captured(size, 0.0, 0, f"{self.facts.name} captures no steps of this model", unit)
        if self.loaded.adapters is not None:
            self.loaded.adapters.use_slots(None)  # the adapters of the latest step are no part of a graph
        with torch.inference_mode():
            if not self.trace_folder or self.recording is not None:  # torch has one profiler
                return graphs.capture(size)
            return self.traced(lambda: graphs.capture(size), f"{self.trace_folder}/{size}-{unit}")

    def traced(self, capture: Callable[[], Captured], folder: str) -> Captured:
        """Captures under a profiler. A trace that cannot be written is logged."""
        recording = Recording(Profile(folder=folder), self.rank)
        captured = capture()
        try:
            recording.write()
        except OSError:
            log.get("graphs").warning(
                "the trace of a capture could not be written", folder=folder, exc_info=True
            )
        else:
            log.get("graphs").info("a capture was traced", folder=folder, rank=self.rank)
        return captured

    def prepare_grammar(self, grammar: Grammar | None, done: Callable[[], None]) -> None:
        """See Executor.prepare_grammar."""
        assert self.loaded is not None, "a grammar before start"
        self.loaded.slots.grammar_masks.prepare(grammar, done)

    def profile(self, command: Profile) -> None:
        """See Executor.profile."""
        if self.recording is not None and not command.folder:
            self.recording.write()
        self.recording = Recording(command, self.rank) if command.folder else None

    def load_adapter(self, command: LoadAdapter) -> None:
        """See Executor.load_adapter."""
        assert self.loaded is not None and self.loaded.adapters is not None, "an adapter where there are none"
        with torch.inference_mode():
            self.loaded.adapters.load(command.id, command.folder)

    def count_experts(self, command: CountExperts) -> Pending:
        """See Executor.count_experts."""
        assert self.loaded is not None and self.loaded.load is not None, (
            "expert counts where nothing is counted"
        )
        with torch.inference_mode():
            return self.loaded.load.serve(command, self.loaded.transfers)

    def change_memory(self, command: ChangeMemory) -> MemoryReport:
        """See Executor.change_memory."""
        assert self.memory_saver is not None, "parts to release before start"
        return self.memory_saver.change_memory(command)

    def update_weights(self, command: UpdateWeights) -> MemoryReport:
        """See Executor.update_weights."""
        assert self.memory_saver is not None, "weights to update before start"
        return self.memory_saver.update_weights(command)

    def close(self) -> None:
        """See Executor.close."""
        if self.loaded is not None:
            if self.loaded.copies is not None:
                self.loaded.copies.close()
            self.loaded.device.collectives.close()
            self.loaded = self.memory_saver = None


def open_adapters(device: Device, model: Model, start: StartRank, config: ModelConfig) -> LoraAdapters | None:
    """LoRA slots and the layers that use them; None: no adapters on these ranks."""
    if start.adapters is None:
        return None
    return LoraAdapters(device, model, model.packed_modules, config, start.adapters, start.max_slots)


def token_bytes(model: Model, kv_dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a token's keys and values in all full layers, and in all layers with a window."""
    sizes = [0, 0]
    for layer in model.attentions:
        sizes[layer.window > 0] += layer.num_kv_heads * (layer.key_dim + layer.value_dim) * kv_dtype.itemsize
    return sizes[0], sizes[1]


def count_pages(
    start: StartRank, windows: tuple[int, ...], budget: int, bytes_of_token: tuple[int, int]
) -> Pools:
    """Pages that fit in `budget` bytes, and no more than can be used. `bytes_of_token`: bytes of a token in
    full layers, and in those with a window. Raises StartError if not even one sequence of one page fits.
    """
    page_size, longest = start.page_size, -(-start.max_len // start.page_size)
    most = start.max_slots * longest
    if start.max_total_tokens is not None:
        most = min(most, start.max_total_tokens // page_size)
    ratio = start.window_ratio if has_two_pools(start.window_ratio, windows, start.max_len) else 0.0
    full_bytes, window_bytes = bytes_of_token
    pools = divide_memory(
        MemoryBudget(
            num_bytes=budget,
            full_page_bytes=full_bytes * page_size,
            window_page_bytes=window_bytes * page_size,
            most=most,
            longest=longest,
            ratio=ratio,
            least=least_pages(max(windows), page_size, start.max_step_tokens),
        )
    )
    if most < 1:
        raise StartError(
            f"--max-total-tokens {start.max_total_tokens} is less than one page; give at least "
            f"--page-size {page_size}"
        )
    if pools.full < 1 or (ratio and pools.window < min(pools.full, least_pages(max(windows), page_size, 1))):
        raise StartError(
            f"no memory is left for keys and values after the weights ({budget} bytes, with "
            "--mem-fraction-static "
            f"{start.memory_fraction} of what is free); raise --mem-fraction-static, or use a smaller "
            "model or dtype"
        )
    return pools
