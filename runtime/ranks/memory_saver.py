"""Releases and resumes what a rank has on its device besides the memory of steps: weights, pages and graphs.

Released weights are read from the checkpoint again, or copied back from host memory (weight_offload.py).
Pages are empty when they are resumed, and as many as before; the host tier does not change. Graphs refer to
both, so they are dropped with either, and the scheduler has them captured again. The state of slots and the
adapters in LoRA slots remain.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.host_memory import HostPages
from runtime.errors import StartError
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.messages.memory import ChangeMemory, MemoryReport, Part, UpdateWeights, in_order
from runtime.ranks.drafting.draft_weights import DraftWeights
from runtime.ranks.model_runner import ModelRunner
from runtime.ranks.open_graphs import open_graphs
from runtime.ranks.recurrent_states import RecurrentStates
from runtime.ranks.routed_experts import sparse_layers
from runtime.ranks.weight_offload import OffloadedModel
from runtime.ranks.weights_loader import WeightsLoader

# StartError: ModelError is one, which a checkpoint raises that has changed
RECOVERABLE = (torch.OutOfMemoryError, MemoryError, OSError, StartError)


def allocate_kv(
    device: Device, layer: Attention | MlaAttention, num_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The cache of one layer: keys and values, or latents and rotary parts, [num_tokens, K, D] each."""
    allocate = device.memory.allocate_cache
    if device.joins_latents and isinstance(layer, MlaAttention):
        return allocate(num_tokens, 1, sum(layer.cache_dims), dtype).split(layer.cache_dims, dim=2)
    return tuple(allocate(num_tokens, layer.num_kv_heads, dim, dtype) for dim in layer.cache_dims)


def num_cache_bytes(kv: list[tuple[Tensor, ...]], states: RecurrentStates | None) -> int:
    """Bytes of the caches and states of all layers."""
    cached = sum(cache.nbytes for pair in kv for cache in pair)
    return cached + (0 if states is None else states.num_bytes)


def first_line(error: Exception) -> str:
    """The first line of an error's text, or the name of its class."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def drop_graphs(runner: ModelRunner) -> None:
    """Drops all captured graphs, because what they refer to is released. No step is running."""
    runner.unsettled = None  # its step is complete
    if (runner.graphs is not None or runner.piecewise is not None) and runner.device.graphs is not None:
        runner.graphs = runner.verifies = runner.piecewise = None
        runner.device.graphs.forget()


class MemorySaver:
    """The parts of one rank's device memory. While one is released, the rank takes no steps."""

    def __init__(
        self,
        rank: int,
        runner: ModelRunner,
        loader: WeightsLoader,
        weights_bytes: int,
        kv_dtype: torch.dtype,
        pool_sizes: list[int],
        host: HostPages | None,
        draft: DraftWeights | None = None,
    ) -> None:
        """`runner` has all parts. `weights_bytes`: bytes of the model's weights on the device; `pool_sizes`:
        pages of each pool, padding pages included; `draft`: None where there is no draft model."""
        self.rank = rank
        self.runner = runner
        self.loader = loader
        self.weights_bytes = weights_bytes  # bytes of the model's weights when they are on the device
        self.kv_dtype = kv_dtype
        self.pool_sizes = pool_sizes
        self.host = host
        self.draft = draft
        self.attentions = list(runner.model.attentions)  # sizes of the layers' caches; they have no weights
        self.released: set[Part] = set()
        self.offloaded_model: OffloadedModel | None = None

    def change_memory(self, command: ChangeMemory) -> MemoryReport:
        """Releases the parts that the command names and resumes the others. A part for which there is no
        memory stays released, and the report has the error."""
        try:
            self.set_released(frozenset(command.released))
        except RECOVERABLE as error:
            self.empty_cache()
            return self.report(command.id, first_line(error))
        return self.report(command.id, "")

    def update_weights(self, command: UpdateWeights) -> MemoryReport:
        """Replaces the weights by those of another checkpoint, or with `is_trial` only checks whether that is
        possible. Raises errors that leave the rank without weights."""
        try:
            loader = self.loader.of_checkpoint(command.model_path, command.load_format)
        except RECOVERABLE as error:
            if not command.is_trial:
                raise
            self.empty_cache()
            return self.report(command.id, first_line(error))
        if not command.is_trial:
            self.replace_weights(loader)
        return self.report(command.id, "")

    def report(self, id: int, error: str) -> MemoryReport:
        """The memory that the rank uses now."""
        adapters, draft_bytes = self.runner.adapters, 0 if self.draft is None else self.draft.num_bytes
        return MemoryReport(
            id,
            self.rank,
            in_order(self.released),
            (0 if "weights" in self.released else self.weights_bytes + draft_bytes)
            + (adapters.num_bytes if adapters is not None else 0),
            num_cache_bytes(self.runner.all_kv, self.runner.states),
            self.runner.device.memory.used_bytes(),
            error,
        )

    def set_released(self, released: frozenset[Part]) -> None:
        """Releases these parts and resumes the others. A part for which there is no memory stays released."""
        if released == self.released:
            return
        drop_graphs(self.runner)
        for part, (release, _) in self.actions.items():
            if part in released - self.released:
                release()
                self.released.add(part)
        self.empty_cache()
        for part, (_, resume) in self.actions.items():
            if part in self.released - released:
                resume()
                self.released.remove(part)
        if not self.released:
            self.open_graphs()

    @property
    def actions(self) -> dict[Part, tuple[Callable[[], None], Callable[[], None]]]:
        """For each part the functions that release and resume it, in the order in which to call them."""
        return {
            "cuda_graph": (lambda: None, lambda: None),
            "kv_cache": (self.release_pages, self.resume_pages),
            "weights": (self.release_weights, self.resume_weights),
        }

    def release_pages(self) -> None:
        """Drops the caches and states of all layers."""
        if self.runner.copies is not None:
            self.runner.copies.close()
            self.runner.copies = None
        self.runner.forward.forget()
        self.runner.kv.clear()
        if self.runner.drafts is not None:
            self.runner.drafts.release_pages()
        if self.runner.states is not None:
            self.runner.states.release()

    def resume_pages(self) -> None:
        """Allocates caches and states of all layers. Raises if there is no memory; none is allocated then."""
        device, page_size = self.runner.device, self.loader.start.page_size
        try:
            for layer in self.attentions:
                num_tokens = self.pool_sizes[layer.pool] * page_size
                self.runner.kv.append(allocate_kv(device, layer, num_tokens, self.kv_dtype))
            if self.draft is not None:
                for layer in self.draft.attentions:
                    num_tokens = self.pool_sizes[0] * page_size
                    self.draft.drafts.kv.append(allocate_kv(device, layer, num_tokens, self.kv_dtype))
                if self.draft.drafts.recurrent is not None:
                    self.draft.drafts.recurrent.memory.allocate()
            if self.runner.states is not None:
                self.runner.states.allocate()
            if self.host is not None:
                self.runner.copies = device.memory.open_page_copier(self.runner.all_kv, self.host, page_size)
        except BaseException:
            self.release_pages()
            raise

    def release_weights(self) -> None:
        """Drops the models, or with a backup moves their weights to host memory."""
        self.runner.forward.forget()
        if self.draft is not None:
            with torch.inference_mode():
                self.draft.release()
        if not self.loader.start.offload_setup.has_backup:
            self.runner.model = self.runner.offload = None
            return
        with torch.inference_mode():
            for layer in self.sparse_layers():
                layer.counts = layer.routed = None  # not weights
            self.offloaded_model = OffloadedModel(self.runner.model)

    def resume_weights(self) -> None:
        """Loads the models, or copies their weights back from host memory. Raises if there is no memory."""
        with torch.inference_mode():
            if self.offloaded_model is not None:
                self.offloaded_model.restore(self.runner.device.torch_device)
                self.offloaded_model = None
            else:
                loaded = self.loader.load()
                self.runner.model, self.weights_bytes = loaded.model, loaded.num_bytes
                self.runner.compiled, self.runner.offload = loaded.compiled, loaded.offload
            if self.draft is not None:
                self.draft.resume(self.runner.model, self.runner.device.torch_device)
            if self.runner.adapters is not None:
                self.runner.adapters.attach(self.runner.model)
            if self.runner.load is not None:
                self.runner.load.attach(self.sparse_layers())
            if self.runner.routed is not None:
                self.runner.routed.attach(self.runner.model)
        self.runner.device.memory.empty_cache()

    def sparse_layers(self) -> list[SparseFeedForward]:
        """The mixture-of-experts layers of the model."""
        return list(sparse_layers(self.runner.model).values())

    def replace_weights(self, loader: WeightsLoader) -> None:
        """Drops the weights, then loads those of another checkpoint: there is no memory for both. Weights
        that are released stay so, and the new ones are loaded when they are resumed."""
        drop_graphs(self.runner)
        self.runner.forward.forget()
        self.loader, self.offloaded_model = loader, None
        self.runner.model = self.runner.offload = None
        if self.draft is not None:
            self.draft.replace(loader.start)
        if "weights" in self.released:
            return
        self.empty_cache()
        self.resume_weights()
        if not self.released:
            self.open_graphs()

    def open_graphs(self) -> None:
        """Makes the runner ready for captures, of which it has none."""
        self.runner.graphs, self.runner.verifies, self.runner.piecewise = open_graphs(self.runner)

    def empty_cache(self) -> None:
        """Returns unused memory to the device. Layers and their adapters are in reference cycles, which the
        garbage collector frees first."""
        gc.collect()
        self.runner.device.memory.empty_cache()
