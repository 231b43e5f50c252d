"""The Executor of all torch devices: builds a batch from a plan, runs the model over it, chooses tokens.

Every rank of a model computes the same batch on its share of the weights; rank 0 alone chooses tokens and reports them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.cache.pools import Pools, Room, has_two_pools, least_pages, share
from runtime.constraint import Grammar
from runtime.devices.base import Arrivals, Batch, Copies, Device, Facts, Progress
from runtime.devices.host import HostPages, open_host
from runtime.errors import StartError
from runtime.layers.attention import Attention, LatentAttention
from runtime.layers.guides import Guides
from runtime.layers.processors import Processors
from runtime.layers.profile import Recording
from runtime.layers.rows import plan_picks, plan_rows
from runtime.layers.sampler import Logprobs, clean, logprobs
from runtime.layers.slots import Slots, to_device
from runtime.messages import Failing, Moves, Profile, PromptLogprobs, RankReady, StartRank, StepPlan, StepResult
from runtime.models.config import read_config
from runtime.models.loader import load, resolve_dtype
from runtime.models.registry import model_class
from runtime.pooling import Pooling

OpenDevice = Callable[[StartRank, int, torch.dtype], Device]
KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PROMPT_LOGITS = 1 << 24  # most logits of a prompt held at once
NO_TOKENS = np.empty(0, np.int32)
NO_LOGPROBS = (np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float32))


class Runner:
    """One rank on one torch device. `start` once, `step` many times, `close` once."""

    def __init__(self, rank: int, open_device: OpenDevice, facts: Facts) -> None:
        self.rank = rank
        self.open_device = open_device
        self.facts = facts
        self.loaded: Loaded | None = None
        self.recording: Recording | None = None

    def start(self, start: StartRank, progress: Progress) -> RankReady:
        times = [perf_counter()]
        config = read_config(start.model_path, is_embedding=start.is_embedding, pooling=start.pooling)
        dtype = resolve_dtype(start.dtype, config, self.facts.dtypes)
        device = self.open_device(start, self.rank, dtype)
        budget = int(device.memory.free_bytes() * start.memory_fraction)
        times.append(perf_counter())
        progress("weights", 0.0)
        model = model_class(config.architecture)(device, dtype, config)
        weights_bytes = load(model, model.fused, config, Path(start.model_path), start.load_format, start.seed, progress,
                             getattr(model, "renames", ()))
        device.memory.settle()
        times.append(perf_counter())
        progress("pages", 0.0)
        kv_dtype = KV_DTYPES.get(start.kv_dtype, dtype)
        token_bytes = [0, 0]  # of full layers, and of those with a window
        for layer in model.attentions:
            token_bytes[layer.window > 0] += layer.num_kv_heads * (layer.key_dim + layer.value_dim) * kv_dtype.itemsize
        pools = count_pages(start, config.windows, budget - weights_bytes, (token_bytes[0], token_bytes[1]))
        sizes = [pages + 1 for pages in (pools.full, pools.window) if pages]  # with the padding pages
        kv = [allocate_kv(device, layer, sizes[layer.pool] * start.page_size, kv_dtype) for layer in model.attentions]
        slots = Slots(start.max_slots, -(-start.max_len // start.page_size), config.vocab_size, device.place, len(sizes),
                      Guides(start.grammar if self.rank == 0 else None, config.vocab_size),
                      Processors(start.processors if self.rank == 0 else []))
        pages_bytes = start.page_size * (sizes[0] * token_bytes[0] + sizes[-1] * token_bytes[1])
        host = self.open_host(start, device, kv, sizes, pages_bytes)
        copies = None if host is None else device.memory.open_copies(kv, host, start.page_size)
        self.loaded = Loaded(device, model, slots, kv, start.page_size, tuple(sorted(set(config.windows))), copies, config.pooling)
        times.append(perf_counter())
        progress("pages", 1.0)
        phases = dict(zip(("device", "weights", "pages"), np.diff(times).tolist(), strict=True))
        return RankReady(
            rank=self.rank, num_pages=sizes[0], num_window_pages=sizes[1] if len(sizes) > 1 else 0, weights_bytes=weights_bytes,
            pages_bytes=pages_bytes, device_name=self.facts.name, phases_s=phases, num_host_pages=host.num_pages if host else 0,
            host_page_bytes=host.page_bytes if host else 0, host_part_bytes=host.part_bytes if host else ())

    def open_host(self, start: StartRank, device: Device, kv: list[tuple[Tensor, Tensor]], sizes: list[int],
                  cache_bytes: int) -> HostPages | None:
        """This rank's host memory, if there is to be any. Raises StartError."""
        if len(sizes) > 1 and (start.host_bytes or start.host_ratio):
            raise StartError("--enable-hierarchical-cache copies pages of all layers, and here sliding-window layers have pages of their "
                             "own; add --disable-hybrid-swa-memory")
        parts = tuple(cache[: start.page_size].nbytes for pair in kv for cache in pair)
        return open_host(start, self.rank, sizes[0] - 1, parts, device.memory.free_host_bytes(cache_bytes))

    def step(self, plan: StepPlan) -> StepResult | None:
        assert self.loaded is not None, "step before start"
        with torch.inference_mode():
            return self.loaded.step(plan)

    def prepare(self, grammar: Grammar | None) -> None:
        assert self.loaded is not None, "a grammar before start"
        self.loaded.slots.guides.prepare(grammar)

    def profile(self, wish: Profile) -> None:
        if self.recording is not None and not wish.folder:
            self.recording.write()
        self.recording = Recording(wish, self.rank) if wish.folder else None

    def close(self) -> None:
        if self.loaded is not None:
            if self.loaded.copies is not None:
                self.loaded.copies.close()
            self.loaded.device.collectives.close()
            self.loaded = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank that can take steps."""

    device: Device
    model: Any  # of a class that models/registry.py names
    slots: Slots
    kv: list[tuple[Tensor, Tensor]]
    page_size: int
    windows: tuple[int, ...]
    copies: Copies | None  # where there is a host tier
    pooling: Pooling | None  # of a model that does not generate

    def step(self, plan: StepPlan) -> StepResult | None:
        begin = perf_counter()
        arrivals = None if plan.moves is None else self.move(plan.moves)
        self.slots.update(plan)
        if len(plan.slots) == 0:
            return self.finish_moves(plan, begin)
        hidden = self.model.forward(self.batch(plan, arrivals))
        if self.pooling is not None:
            return self.pool(plan, hidden, self.pooling, begin)
        prompt = list(self.prompt_logprobs(plan, hidden))
        tokens, found = self.sample(plan, hidden)
        if plan.moves is not None and self.copies is not None:
            self.copies.finish()
        if self.device.collectives.rank != 0:
            return None
        token_ids = tokens.int().cpu().numpy()
        width = -1 if found is None else found.top_ids.shape[1]
        values, top_ids, top = NO_LOGPROBS if found is None else _host(found)
        failed = self.took(plan, token_ids) if self.slots.follows else {}
        return StepResult(plan.step, token_ids, width, values, top_ids, top, prompt, perf_counter() - begin, failed)

    def pool(self, plan: StepPlan, hidden: Tensor, pooling: Pooling, begin: float) -> StepResult | None:
        """A vector of each row that is complete, where other models sample a token."""
        rows = np.flatnonzero(plan.samples)
        picks = plan_picks(pooling.mode, plan.counts.astype(np.int64), rows, self.device.place)
        vectors = self.model.vectors(hidden, picks) if len(rows) else torch.empty(0)
        if plan.moves is not None and self.copies is not None:
            self.copies.finish()
        if self.device.collectives.rank != 0:
            return None
        return StepResult(plan.step, NO_TOKENS, -1, *NO_LOGPROBS, [], perf_counter() - begin, vectors=vectors.flatten().cpu().numpy())

    def took(self, plan: StepPlan, token_ids: np.ndarray) -> dict[int, Failing]:
        """Tells grammars and processors what was sampled. -> places of tokens that mean nothing, and why"""
        slots, tokens = plan.slots[np.flatnonzero(plan.samples)].tolist(), token_ids.tolist()
        failed = dict.fromkeys(self.slots.guides.unguided(slots), Failing.GRAMMAR)
        self.slots.guides.took(slots, tokens)
        return failed | dict.fromkeys(self.slots.processors.took(slots, tokens), Failing.PROCESSOR)

    def move(self, moves: Moves) -> Arrivals | None:
        """Saves, and begins to load."""
        assert self.copies is not None, "moves, but no host tier"
        if len(moves.save_pages):
            self.copies.save(moves.save_pages, moves.save_hosts)
        return self.copies.load(moves.load_hosts, moves.load_pages) if len(moves.load_pages) else None

    def finish_moves(self, plan: StepPlan, begin: float) -> StepResult | None:
        """The end of a plan without rows, which no forward has ordered among the ranks: rank 0's result says that all of them are done."""
        if self.copies is not None:
            self.copies.finish()
        self.device.collectives.all_reduce(torch.zeros(1, device=self.device.place)).cpu()
        if self.device.collectives.rank != 0:
            return None
        return StepResult(plan.step, NO_TOKENS, -1, *NO_LOGPROBS, [], perf_counter() - begin)

    def batch(self, plan: StepPlan, arrivals: Arrivals | None) -> Batch:
        """The tokens of a step with their positions and places in the cache. Reads nothing from the device."""
        place = self.device.place
        counts = plan.counts.astype(np.int64)
        ends = counts.cumsum()
        host_positions = np.repeat(plan.starts - (ends - counts), counts)
        host_positions += np.arange(len(host_positions))
        positions = to_device(host_positions, place)
        token_slots = to_device(np.repeat(plan.slots, counts), place)
        token_ids = self.slots.last_token[token_slots[: plan.num_decodes]]
        if len(plan.token_ids):
            token_ids = torch.cat((token_ids, to_device(plan.token_ids, place)))
        if not self.kv:  # an encoder
            is_second = (self.slots.second_at[plan.slots] > 0).repeat(counts)
            types = is_second & (host_positions >= self.slots.second_at[plan.slots].repeat(counts))
            return Batch(token_ids, positions, (), self.kv, plan_rows(counts, place), to_device(types, place), arrivals)
        pages = self.slots.page_tables[:, token_slots, positions // self.page_size].long()
        locations = (pages * self.page_size + positions % self.page_size).unbind()
        attention = self.device.ops.plan_attention(plan, self.slots.page_tables, self.page_size, self.windows)
        return Batch(token_ids, positions, locations, self.kv, attention, arrivals=arrivals)

    def sample(self, plan: StepPlan, hidden: Tensor) -> tuple[Tensor, Logprobs | None]:
        """Tokens after the rows that sample, int64 [N], which also become their slots' last tokens."""
        rows, place = np.flatnonzero(plan.samples), self.device.place
        if len(rows) == 0:
            return torch.empty(0, dtype=torch.int64, device=place), None
        if len(rows) < len(hidden):
            hidden = hidden.index_select(0, to_device(plan.counts.cumsum()[rows] - 1, place))
        logits = self.model.logits(hidden)
        slots, lengths = plan.slots[rows], (plan.starts + plan.counts)[rows]
        if self.device.collectives.rank == 0:
            tokens, found = self.slots.sample(self.device.ops, logits, slots, lengths)
        else:
            tokens, found = torch.empty(len(rows), dtype=torch.int64, device=place), None
        tokens = self.device.collectives.broadcast(tokens)
        self.slots.last_token[to_device(slots, place)] = tokens
        return tokens, found

    def prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> Iterator[PromptLogprobs]:
        """Of each extend row of a slot that wants them."""
        if len(plan.prompt_targets) == 0:
            return
        first, used = plan.num_decodes, 0
        for slot, count in zip(plan.slots[first:].tolist(), plan.counts[first:].tolist(), strict=True):
            width = int(self.slots.prompt_logprobs[slot])
            if width >= 0:
                yield self.row_logprobs(slot, width, hidden[first : first + count], plan.prompt_targets[used : used + count])
                used += count
            first += count

    def row_logprobs(self, slot: int, width: int, hidden: Tensor, targets: np.ndarray) -> PromptLogprobs:
        """In chunks, as the logits of a whole prompt would fill the memory."""
        known = to_device(np.maximum(targets, 0), self.device.place)
        chunk = max(1, PROMPT_LOGITS // self.slots.vocab_size)
        parts = []
        for at in range(0, len(targets), chunk):
            logits = clean(self.model.logits(hidden[at : at + chunk]))
            found = logprobs(logits, known[at : at + chunk], width)
            if slot in self.slots.picks:
                self.slots.pick(found, logits, slice(None), slot, width)
            parts.append(_host(found))
        values, ids, top = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return PromptLogprobs(slot, width, np.where(targets < 0, np.float32(np.nan), values), ids, top)


def allocate_kv(device: Device, layer: Attention | LatentAttention, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, or what it keeps in their place."""
    allocate = partial(device.memory.allocate_cache, num_tokens, layer.num_kv_heads)
    return allocate(layer.key_dim, dtype), allocate(layer.value_dim, dtype)


def _host(found: Logprobs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return found.chosen.cpu().numpy(), found.top_ids.cpu().numpy().ravel(), found.top.cpu().numpy().ravel()


def count_pages(start: StartRank, windows: tuple[int, ...], budget: int, token_bytes: tuple[int, int]) -> Pools:
    """Pages as the memory budget allows, and no more than options let be used. `token_bytes`: of full layers, and of those with a window.

    Raises StartError when not even one sequence of one page fits.
    """
    page_size, longest = start.page_size, -(-start.max_len // start.page_size)
    most = start.max_slots * longest
    if start.max_total_tokens is not None:
        most = min(most, start.max_total_tokens // page_size)
    ratio = start.window_ratio if has_two_pools(start.window_ratio, windows, start.max_len) else 0.0
    full_bytes, window_bytes = token_bytes
    pools = share(Room(num_bytes=budget, full_page_bytes=full_bytes * page_size, window_page_bytes=window_bytes * page_size,
                       most=most, longest=longest, ratio=ratio, least=least_pages(max(windows), page_size, start.max_step_tokens)))
    if most < 1:
        raise StartError(f"--max-total-tokens {start.max_total_tokens} is less than one page; give at least --page-size {page_size}")
    if pools.full < 1 or (ratio and pools.window < min(pools.full, least_pages(max(windows), page_size, 1))):
        raise StartError(f"no memory is left for keys and values after the weights ({budget} bytes, with --mem-fraction-static "
                         f"{start.memory_fraction} of what is free); raise --mem-fraction-static, or use a smaller model or dtype")
    return pools
