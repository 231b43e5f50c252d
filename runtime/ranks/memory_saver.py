"""What a rank holds of its device besides what a step takes: weights, pages, graphs. They can be given back,
and taken again.

Weights that were given back are read again from the checkpoint, or come from host memory (hosted.py). Pages
come back empty, as many as there were; the host tier is not touched. Graphs point into both, so none outlives
either; the scheduler has them captured again. What slots keep, and the seats of adapters, stays.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from runtime import log
from runtime.devices.base import Device
from runtime.devices.host_memory import HostPages
from runtime.errors import ModelError, StartError
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.messages.memory import ChangeMemory, MemoryReport, Part, UpdateWeights, chosen, in_order
from runtime.messages.ranks import StartRank
from runtime.models.base import Model
from runtime.models.config import ModelConfig, read_config
from runtime.models.loader import check_weights, layer_sizes, load
from runtime.models.registry import model_class
from runtime.ranks.compile import compile_model
from runtime.ranks.model_runner import ModelRunner
from runtime.ranks.weight_offload import Offload, OffloadedModel

# a ModelError is one: the checkpoint may have changed
NO_MEMORY = (torch.OutOfMemoryError, MemoryError, OSError, StartError)
# of the config: what other weights may change
FREE = ("dtype", "bos_id", "eos_ids", "context_len", "sampling_defaults", "draft_layers")


def allocate_kv(
    device: Device, layer: Attention | MlaAttention, num_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, or what it keeps in their place."""
    allocate = partial(device.memory.allocate_cache, num_tokens, layer.num_kv_heads)
    return allocate(layer.key_dim, dtype), allocate(layer.value_dim, dtype)


def read_model(start: StartRank) -> ModelConfig:
    """Raises ModelError."""
    config = read_config(
        start.model_path,
        is_embedding=start.is_embedding,
        pooling=start.pooling,
        quantization=start.quantization,
        overrides=start.config_overrides,
    )
    return structs.replace(config, has_wide_head=start.has_wide_head)


def first_line(error: Exception) -> str:
    """The first line of an error's text, or the name of its class."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def drop_graphs(loaded: ModelRunner) -> None:
    """Those that were captured, as what they point into goes. No step is under way."""
    loaded.unsettled = None  # its step is done
    if (loaded.graphs is not None or loaded.pieces is not None) and loaded.device.graphs is not None:
        loaded.graphs = loaded.pieces = None
        loaded.device.graphs.forget()


class Weights:
    """Makes the model of one rank, as often as it is needed."""

    def __init__(self, device: Device, start: StartRank, config: ModelConfig, dtype: torch.dtype) -> None:
        self.device = device
        self.start = start
        self.config = config
        self.dtype = dtype
        self.num_bytes = 0  # on the device, of the model that was made last
        self.nowhere = replace(device, torch_device=torch.device("meta"))
        if start.offload_setup.offload is not None:
            sizes = layer_sizes(self._empty(self.nowhere), config, Path(start.model_path), start.load_format)
            self.device = replace(
                device,
                layer_devices=dict.fromkeys(chosen(start.offload_setup.offload, sizes), torch.device("cpu")),
            )

    def make(self, progress: Callable[[str, float], None] = lambda phase, fraction: None) -> Model:
        """Raises ModelError."""
        self.device.memory.prepare_loading()
        model = self._empty(self.device)
        self.num_bytes = load(
            model, self.config, Path(self.start.model_path), self.start.load_format, self.start.seed, progress
        )
        if self.start.offload_setup.offload is not None:
            with torch.inference_mode():
                offload = Offload(
                    self.device,
                    [model.layers[i] for i in self.device.layer_devices],
                    self.start.offload_setup.offload.ahead,
                )
            self.num_bytes += offload.buffer_bytes - offload.host_bytes
            log.get("start").info(
                "layers in host memory",
                layers=list(self.device.layer_devices),
                bytes=offload.host_bytes,
                buffer_bytes=offload.buffer_bytes,
            )
        if self.start.compiled.is_wanted:
            progress("compile", 0.0)
            compile_model(model, self.device, self.dtype, explains=self.start.compiled.explains)
        return model

    def of_checkpoint(self, model_path: str, load_format: str) -> "Weights":
        """The same model with the weights of another checkpoint. Raises ModelError where that is not what
        this one holds."""
        start = structs.replace(self.start, model_path=model_path, load_format=load_format)
        config = read_model(start)
        wrong = [
            name
            for name in config.__struct_fields__
            if name not in FREE and getattr(config, name) != getattr(self.config, name)
        ]
        if wrong:
            raise ModelError(
                f"the checkpoint is of another model: config.json differs in {', '.join(wrong)}; start a server with it"
            )
        if load_format != "dummy":
            model = self._empty(self.nowhere)
            check_weights(model, config, Path(model_path))
        return Weights(replace(self.device, layer_devices={}), start, config, self.dtype)

    def _empty(self, device: Device) -> Model:
        return model_class(self.config.architecture)(device, self.dtype, self.config)


class RankMemory:
    """The parts of one rank. While one is given back, the rank takes no steps."""

    def __init__(
        self,
        rank: int,
        loaded: ModelRunner,
        weights: Weights,
        kv_dtype: torch.dtype,
        sizes: list[int],
        host: HostPages | None,
    ) -> None:
        """`sizes`: pages of each pool, padding pages included. `loaded` has them all."""
        self.rank = rank
        self.loaded = loaded
        self.weights = weights
        self.kv_dtype = kv_dtype
        self.sizes = sizes
        self.host = host
        self.attentions = list(loaded.model.attentions)  # what layers keep of a token; they hold no weights
        self.released: set[Part] = set()
        self.offloaded_model: OffloadedModel | None = None

    def change_memory(self, command: ChangeMemory) -> MemoryReport:
        """Releases the parts that the command names and resumes the others. A part for which there is no
        memory stays released, and the report has the error."""
        try:
            self.release_only(frozenset(command.released))
        except NO_MEMORY as error:
            self.settle()
            return self.report(command.id, first_line(error))
        return self.report(command.id, "")

    def update_weights(self, command: UpdateWeights) -> MemoryReport:
        """Replaces the weights by those of another checkpoint, or with `is_trial` only checks whether that is
        possible. Raises what leaves the rank without weights."""
        try:
            weights = self.weights.of_checkpoint(command.model_path, command.load_format)
        except NO_MEMORY as error:
            if not command.is_trial:
                raise
            self.settle()
            return self.report(command.id, first_line(error))
        if not command.is_trial:
            self.replace_weights(weights)
        return self.report(command.id, "")

    def report(self, id: int, error: str) -> MemoryReport:
        memory = self.loaded.device.memory
        return MemoryReport(
            id,
            self.rank,
            in_order(self.released),
            self.weights_bytes,
            self.pages_bytes,
            memory.used_bytes(),
            error,
        )

    @property
    def weights_bytes(self) -> int:
        adapters = self.loaded.adapters
        return (self.weights.num_bytes if "weights" not in self.released else 0) + (
            adapters.num_bytes if adapters is not None else 0
        )

    @property
    def pages_bytes(self) -> int:
        return sum(cache.nbytes for pair in self.loaded.kv for cache in pair)

    def release_only(self, released: frozenset[Part]) -> None:
        """Everything but what is named. What there was no room for stays given back."""
        if released == self.released:
            return
        drop_graphs(self.loaded)
        for part, (give_back, _) in self.ways.items():
            if part in released - self.released:
                give_back()
                self.released.add(part)
        self.settle()
        for part, (_, take) in self.ways.items():
            if part in self.released - released:
                take()
                self.released.remove(part)
        if not self.released:
            self.open_graphs()

    @property
    def ways(self) -> dict[Part, tuple[Callable[[], None], Callable[[], None]]]:
        """How each part is given back, and how it is taken again."""
        return {
            "cuda_graph": (lambda: None, lambda: None),
            "kv_cache": (self.drop_pages, self.take_pages),
            "weights": (self.drop_weights, self.take_weights),
        }

    def drop_pages(self) -> None:
        if self.loaded.copies is not None:
            self.loaded.copies.close()
            self.loaded.copies = None
        self.loaded.kv.clear()

    def take_pages(self) -> None:
        device, start = self.loaded.device, self.weights.start
        try:
            for layer in self.attentions:
                self.loaded.kv.append(
                    allocate_kv(device, layer, self.sizes[layer.pool] * start.page_size, self.kv_dtype)
                )
            if self.host is not None:
                self.loaded.copies = device.memory.open_page_copier(
                    self.loaded.kv, self.host, start.page_size
                )
        except BaseException:
            self.drop_pages()
            raise

    def drop_weights(self) -> None:
        if not self.weights.start.offload_setup.has_backup:
            self.loaded.model = None
            return
        with torch.inference_mode():
            for layer in self.experts():
                layer.counts = None  # no weights
            self.offloaded_model = OffloadedModel(self.loaded.model)

    def take_weights(self) -> None:
        with torch.inference_mode():
            if self.offloaded_model is not None:
                self.offloaded_model.come_back(self.loaded.device.torch_device)
                self.offloaded_model = None
            else:
                self.loaded.model = self.weights.make()
            if self.loaded.adapters is not None:
                self.loaded.adapters.attach(self.loaded.model)
            if self.loaded.load is not None:
                self.loaded.load.attach(self.experts())
        self.loaded.device.memory.empty_cache()

    def experts(self) -> list[SparseFeedForward]:
        return [
            mlp
            for layer in self.loaded.model.layers
            if isinstance(mlp := getattr(layer, "mlp", None), SparseFeedForward)
        ]

    def replace_weights(self, weights: Weights) -> None:
        """Drops the weights before it loads others: there is no memory for both. If weights are released,
        those are loaded when they are resumed."""
        drop_graphs(self.loaded)
        self.weights, self.offloaded_model, self.loaded.model = weights, None, None
        if "weights" in self.released:
            return
        self.settle()
        self.take_weights()
        if not self.released:
            self.open_graphs()

    def open_graphs(self) -> None:
        start = self.weights.start
        self.loaded.open_graphs(
            start.graph_sizes, start.piecewise_sizes, start.compiled, pads=start.graph_pads
        )

    def settle(self) -> None:
        """Layers and what adapters add to them refer to each other."""
        gc.collect()
        self.loaded.device.memory.empty_cache()
