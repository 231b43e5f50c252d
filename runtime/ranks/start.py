"""Starts a rank of a torch device: loads the model, measures memory, allocates pages, and makes what the
executor is constructed with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from runtime.cache.pool_sizes import MemoryBudget, Pools, divide_memory, has_two_pools, least_pages
from runtime.devices.base import Device
from runtime.devices.facts import DeviceFacts
from runtime.devices.host_memory import HostPages, open_host
from runtime.devices.progress import Progress
from runtime.errors import StartError
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.lora import LoraAdapters
from runtime.messages.lora import AdapterSetup
from runtime.messages.ranks import RankReady, StartRank
from runtime.models.base import Model
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.quantization_schemes import require_supported
from runtime.models.config.recurrent_config import draft_nodes
from runtime.models.loader import DTYPES, resolve_dtype
from runtime.models.vision.encoder_alone import maker
from runtime.ranks.cross_cache import CrossCache, media_bytes, open_cross
from runtime.ranks.drafting.draft_weights import open_draft_weights
from runtime.ranks.drafting.open_drafts import LoadedDraft, open_draft_loader, with_aux_layers
from runtime.ranks.drafting.open_runner import draft_state_bytes, open_drafts
from runtime.ranks.expert_counts import forget_step, open_load
from runtime.ranks.graph_setup import GraphSetup
from runtime.ranks.host_states import host_share, open_host_states
from runtime.ranks.kernel_steps import compile_kernels
from runtime.ranks.memory_saver import MemorySaver, allocate_kv, num_cache_bytes
from runtime.ranks.model_runner import ModelRunner
from runtime.ranks.open_slots import open_slots
from runtime.ranks.pipeline import of_stage, open_pipeline
from runtime.ranks.profile_run import largest_step, run_largest_step, step_pages
from runtime.ranks.recurrent_states import RecurrentStates
from runtime.ranks.routed_experts import open_routed
from runtime.ranks.slots import Slots
from runtime.ranks.step_copies import Reported, unreported
from runtime.ranks.weights_loader import WeightsLoader, read_model

UNBOUNDED = (1 << 31) - 1  # of what a rank has none of, and others have
OpenDevice = Callable[[StartRank, int, torch.dtype], Device]
KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class StartedRank:
    """A rank that has its model and its memory."""

    runner: ModelRunner
    memory_saver: MemorySaver
    ready: RankReady
    trace_folder: str  # where traces of captures are written; empty: none are
    num_ranks: int  # of all stages


def start_torch_rank(
    rank: int,
    start: StartRank,
    progress: Progress,
    open_device: OpenDevice,
    facts: DeviceFacts,
    reported: Reported = unreported,
) -> StartedRank:
    """Opens the device, loads weights and allocates memory. `reported`: see ModelRunner. Raises StartError,
    ModelError among them."""
    times = [perf_counter()]
    progress("device", 0, 0)
    config, dtype = read_supported(rank, start, facts)
    device = with_aux_layers(open_device(start, rank, dtype), start, config, facts.schemes)
    budget = int(device.memory.free_bytes() * start.memory_fraction)
    times.append(perf_counter())
    loader = WeightsLoader(device, start, config, dtype, facts.schemes, maker(start, dtype, config))
    draft_loader = open_draft_loader(device, start, config, dtype, facts.schemes)
    model = (loaded := loader.load(progress, writes=True)).model
    draft = None if draft_loader is None else draft_loader.load(model, progress)
    adapters = open_adapters(device, model, start, config)
    weights_bytes = loaded.num_bytes + sum(part.num_bytes for part in (adapters, draft) if part is not None)
    experts, routed = open_load(device, model, start.expert_steps), open_routed(device, model, start)
    device.memory.empty_cache()
    times.append(perf_counter())
    progress("profile", 0, 0)
    config = of_stage(config, device.stage)
    dtypes = Dtypes(dtype, KV_DTYPES.get(start.kv_dtype, dtype), DTYPES[start.state_dtype])
    cross = open_cross(device, model, config, start.page_size, start.max_slots, dtype)
    budget -= weights_bytes + sum(part.num_bytes for part in (experts, routed) if part is not None)
    budget -= media_bytes(config.media if device.stage.is_first else None, cross, dtype.itemsize)
    num_bytes = min(budget, memory_for_pages(device, model, start, config, dtypes, draft, cross, progress))
    forget_step(experts)
    progress("pages", 0, 0)
    sizes, kv, draft_kv, states = allocate_pages(device, model, start, config, dtypes, num_bytes, draft)
    slots = open_slots(rank, device, start, config, len(sizes), cross)
    host = open_host_tier(rank, start, device, kv + draft_kv, sizes, states)
    copies = None if host is None else device.memory.open_page_copier(kv + draft_kv, host, start.page_size)
    load_adapters(adapters, start.adapters)
    runner = ModelRunner(
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
        GraphSetup.of(start),
        loaded.compiled,
        states,
        open_drafts(device, draft, slots, draft_kv, start, dtype, dtypes.states),
        open_pipeline(device, start, config, dtype),
        start.encoding == "shared",
        loaded.offload,
        reported,
        start.diagnosis,
        routed,
    )
    weights = open_draft_weights(runner.drafts, draft_loader, draft, start)
    memory_saver = MemorySaver(rank, runner, loader, loaded.num_bytes, dtypes.kv, sizes, host, weights)
    times.append(perf_counter())
    ready = report(rank, runner, sizes, weights_bytes, np.diff(times).tolist())
    ready = with_sizes(ready, host, states, has_states=keeps_states(start, config))
    return StartedRank(runner, memory_saver, ready, start.trace_folder, start.num_ranks)


def read_supported(rank: int, start: StartRank, facts: DeviceFacts) -> tuple[ModelConfig, torch.dtype]:
    """The model, and the type of its activations. Raises ModelError for what the device does not compute."""
    config = read_model(start, facts.schemes, rank % start.attention_layout.num_head_ranks)
    dtype = resolve_dtype(start.dtype, config, (*facts.dtypes, *facts.other_dtypes))
    if config.quantization is not None:
        require_supported(config.quantization.schemes, facts.schemes, facts.name)
    return config, dtype


def report(
    rank: int, runner: ModelRunner, sizes: list[int], weights_bytes: int, times_s: list[float]
) -> RankReady:
    """The report of a start. `sizes`: pages of each pool; `times_s`: of its three phases."""
    return RankReady(
        rank=rank,
        num_pages=sizes[0],
        num_window_pages=sizes[1] if len(sizes) > 1 else 0,
        weights_bytes=weights_bytes,
        pages_bytes=num_cache_bytes(runner.all_kv, runner.states),
        device_name=runner.device.facts.name,
        phases_s=dict(zip(("device", "weights", "pages"), times_s, strict=True)),
        used_bytes=runner.device.memory.used_bytes(),
    )


def keeps_states(start: StartRank, config: ModelConfig) -> bool:
    """Whether a rank of the model may have states. `config`: of this rank's stage."""
    return config.num_recurrent_layers > 0 or (start.pp_size > 1 and config.recurrent is not None)


def with_sizes(
    ready: RankReady, host: HostPages | None, states: RecurrentStates | None, *, has_states: bool
) -> RankReady:
    """The report of a start with the sizes of states and of the host tier, if there are any. `has_states`: a
    rank of the model has states, which a rank without recurrent layers does not bound."""
    if has_states and states is None:
        ready = structs.replace(ready, num_state_slots=UNBOUNDED, num_host_states=UNBOUNDED if host else 0)
    if states is not None:
        num_host_states = 0 if states.host is None else states.host.num_states
        ready = structs.replace(
            ready, num_state_slots=states.num_state_slots, num_host_states=num_host_states
        )
    if host is None:
        return ready
    return structs.replace(ready, num_host_pages=host.num_pages, host_part_bytes=host.part_bytes)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Types of what a rank keeps of sequences."""

    activations: torch.dtype
    kv: torch.dtype
    states: torch.dtype  # recurrent states


def allocate_pages(
    device: Device,
    model: Model,
    start: StartRank,
    config: ModelConfig,
    dtypes: Dtypes,
    budget: int,
    draft: LoadedDraft | None,
) -> tuple[list[int], list[tuple[Tensor, ...]], list[tuple[Tensor, ...]], RecurrentStates | None]:
    """Pages of each pool, padding pages included, the cache of each layer, and of each of a draft model, and
    the states of recurrent layers, in `budget` bytes."""
    recurrent, ranks = config.recurrent, device.group_ranks.size
    state_bytes = 0
    if recurrent is not None:
        item = dtypes.activations.itemsize
        state_bytes = recurrent.state_bytes(ranks, item, dtypes.states.itemsize)
        budget -= recurrent.draft_bytes(ranks, item) * draft_nodes(start.max_slots)
    full_bytes, window_bytes = token_bytes(model.attentions, dtypes.kv)
    if draft is not None:  # all of its layers have pages of the first pool
        full_bytes += sum(token_bytes(draft.network.attentions, dtypes.kv))
        budget -= draft_state_bytes(draft, start, dtypes.activations, dtypes.states)
    windows = config.windows if start.encoding != "alone" else (0,)  # an encoder has no pages
    pools = count_pages(start, windows, budget, (full_bytes, window_bytes), state_bytes)
    sizes = [pages + 1 for pages in (pools.full, pools.window) if pages]  # with the padding pages
    kv = [
        allocate_kv(device, layer, sizes[layer.pool] * start.page_size, dtypes.kv)
        for layer in model.attentions
    ]
    draft_kv = allocate_draft_kv(device, draft, start, sizes[0], dtypes)
    if device.take_pages is not None:
        device.take_pages(kv + draft_kv)
    return sizes, kv, draft_kv, open_states(device, start, config, dtypes, pools.states + 1)


def allocate_draft_kv(
    device: Device, draft: LoadedDraft | None, start: StartRank, num_pages: int, dtypes: Dtypes
) -> list[tuple[Tensor, ...]]:
    """The cache of each layer of a draft model, if there is one."""
    attentions = [] if draft is None else draft.network.attentions
    return [allocate_kv(device, layer, num_pages * start.page_size, dtypes.kv) for layer in attentions]


def open_states(
    device: Device, start: StartRank, config: ModelConfig, dtypes: Dtypes, num_state_slots: int
) -> RecurrentStates | None:
    """States of recurrent layers, the padding slot included; None: the model has no such layers."""
    if config.recurrent is None or not config.num_recurrent_layers:
        return None
    return RecurrentStates(
        device, config.recurrent, dtypes.activations, dtypes.states, num_state_slots, start.max_slots
    )


def memory_for_pages(
    device: Device,
    model: Model,
    start: StartRank,
    config: ModelConfig,
    dtypes: Dtypes,
    draft: LoadedDraft | None,
    cross: CrossCache | None,
    progress: Progress,
) -> int:
    """Bytes that pages may take so that there is memory for the largest step as well, if the device can
    measure what that takes. Kernels are compiled before it is measured."""
    if config.encoder is not None or config.pooling is not None or start.encoding == "alone":
        return device.memory.free_bytes()

    def run() -> None:
        # some operators read pages, so layers of one shape share a cache of the step's size
        num_tokens = step_pages(largest_step(start), start.page_size) * start.page_size
        forms = {(layer.num_kv_heads, layer.cache_dims): layer for layer in model.attentions}
        caches = {form: allocate_kv(device, layer, num_tokens, dtypes.kv) for form, layer in forms.items()}
        kv = [caches[layer.num_kv_heads, layer.cache_dims] for layer in model.attentions]
        slots = Slots(
            start.max_slots,
            -(-start.max_len // start.page_size),
            config.vocab_size,
            device.torch_device,
            cross=cross,
        )
        windows = tuple(sorted(set(config.windows)))
        states = open_states(device, start, config, dtypes, 1)  # all rows use the padding slot
        draft_kv = allocate_draft_kv(device, draft, start, num_tokens // start.page_size, dtypes)
        drafts = open_drafts(device, draft, slots, draft_kv, start, dtypes.activations, dtypes.states)
        runner = ModelRunner(
            device,
            model,
            slots,
            kv,
            start.page_size,
            windows,
            None,
            None,
            states=states,
            drafts=drafts,
            pipeline=open_pipeline(device, start, config, dtypes.activations),
        )
        compile_kernels(runner, start, progress)
        run_largest_step(runner, start)

    return device.memory.free_bytes() - device.memory.measure_peak(run)


def open_host_tier(
    rank: int,
    start: StartRank,
    device: Device,
    kv: list[tuple[Tensor, ...]],
    sizes: list[int],
    states: RecurrentStates | None,
) -> HostPages | None:
    """This rank's host memory for pages; None without a host tier. That for states is theirs. Raises
    StartError."""
    if len(sizes) > 1 and (start.host_bytes or start.host_ratio):
        raise StartError(
            "--enable-hierarchical-cache copies pages of all layers, and here sliding-window layers "
            "have pages of their "
            "own; add --disable-hybrid-swa-memory"
        )
    parts = tuple(cache[: start.page_size].nbytes for pair in kv for cache in pair)
    if not kv and (start.host_bytes or start.host_ratio):
        raise StartError(
            "--enable-hierarchical-cache copies states along with pages of keys and values, and this model "
            "has none; leave it out"
        )
    free_bytes = device.memory.free_host_bytes(num_cache_bytes(kv, states))
    if states is not None:
        states.host = open_host_states(start, rank, states.tensors, free_bytes)
        if states.host is not None:
            free_bytes = max(free_bytes - states.host.places.nbytes, 0)
            start = structs.replace(start, host_bytes=int(start.host_bytes * (1 - host_share(start))))
    return open_host(start, rank, sizes[0] - 1, parts, free_bytes)


def load_adapters(adapters: LoraAdapters | None, setup: AdapterSetup | None) -> None:
    """Reads the adapters that ranks start with, if any, to host memory. Raises ModelError."""
    if adapters is None or setup is None:
        return
    with torch.inference_mode():
        for command in setup.loaded:
            adapters.load(command.id, command.folder)


def open_adapters(device: Device, model: Model, start: StartRank, config: ModelConfig) -> LoraAdapters | None:
    """LoRA slots and the layers that use them; None: no adapters on these ranks."""
    if start.adapters is None:
        return None
    return LoraAdapters(device, model, model.packed_modules, config, start.adapters, start.max_slots)


def token_bytes(attentions: Sequence[Attention | MlaAttention], kv_dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a token's keys and values in all full layers, and in all layers with a window."""
    sizes = [0, 0]
    for layer in attentions:
        sizes[layer.window > 0] += layer.num_kv_heads * sum(layer.cache_dims) * kv_dtype.itemsize
    return sizes[0], sizes[1]


def count_pages(
    start: StartRank,
    windows: tuple[int, ...],
    budget: int,
    bytes_of_token: tuple[int, int],
    state_bytes: int = 0,
) -> Pools:
    """Pages and states that fit in `budget` bytes, and no more than can be used. `bytes_of_token`: bytes of a
    token in full layers, and in those with a window; `state_bytes`: of a sequence's states, 0 without
    recurrent layers. Raises StartError if not even one sequence of one page fits."""
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
            state_bytes=state_bytes,
            state_ratio=start.state_ratio,
            num_states=start.num_states,
            most_running=start.max_slots,
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
