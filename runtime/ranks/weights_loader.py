"""Makes the model of one rank with its weights: at start, when weights are resumed, and when they are
updated."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import get_args

import torch
from msgspec import structs

from runtime import log
from runtime.deferred_torch import load_deferred
from runtime.devices.base import Device
from runtime.devices.packed import KeptMismatch, KeptWeights
from runtime.devices.progress import Progress, without_progress
from runtime.errors import ModelError
from runtime.layers.moe.expert_weights import ExpertWeights
from runtime.messages.experts import Placement
from runtime.messages.memory import offloaded_layers
from runtime.messages.ranks import StartRank
from runtime.models.base import CompiledLayer, Model, is_piecewise
from runtime.models.checkpoint import Checkpoint, Function
from runtime.models.config.model_config import ModelConfig, read_config
from runtime.models.config.quantization_schemes import SCHEMES
from runtime.models.config.registry import model_class
from runtime.models.config.weight_files import READ_AS, StoredAs, weight_files
from runtime.models.kept_weights import check_complete, replaced, storages
from runtime.models.loader import allocate, check_weights, fill, fill_experts, layer_sizes, load
from runtime.ranks.checkpoint_key import checkpoint_key
from runtime.ranks.compile import compile_layers
from runtime.ranks.weight_offload import LayerOffload, tensors

# fields of the config that may differ between checkpoints of one model
FREE_FIELDS = ("dtype", "bos_id", "eos_ids", "context_len", "sampling_defaults", "draft_layers")


def weight_function(path: str) -> Function:
    """A function of --custom-weight-loader. Raises ModelError."""
    module, _, name = path.partition(":")
    try:
        found: Function = getattr(import_module(module), name)
    except Exception as error:  # of the user's own module
        raise ModelError(
            f"--custom-weight-loader {path} can't be loaded ({type(error).__name__}: {error}); give "
            "package.module:function of a module that Python finds"
        ) from error
    return found


def read_model(start: StartRank, schemes: tuple[str, ...] = SCHEMES, rank: int = 0) -> ModelConfig:
    """The config of the model that this rank is to load, on a device that computes these schemes. `rank`: of
    those that share the attention heads. Raises ModelError."""
    config = read_config(
        start.model_path,
        is_embedding=start.is_embedding,
        pooling=start.pooling,
        quantization=start.quantization,
        overrides=start.config_overrides,
        config_file=start.config_file,
        model_impl=start.model_impl,
        takes_media=start.encoding != "none",
    )
    held = None if config.quantization is None else config.quantization.on_device(schemes)
    scales = start.cache_scales[rank] if start.cache_scales else ()
    return structs.replace(
        config,
        has_wide_head=start.has_wide_head,
        quantization=held,
        cache_scales=scales,
        encodes_elsewhere=start.encoding == "elsewhere",
    )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and the bytes that these take on the device."""

    model: Model
    num_bytes: int
    compiled: CompiledLayer | None  # None: nothing is compiled
    offload: LayerOffload | None  # None: no layer's weights are in host memory


class WeightsLoader:
    """Makes the model of one rank from one checkpoint, as often as it is needed."""

    def __init__(
        self,
        device: Device,
        start: StartRank,
        config: ModelConfig,
        dtype: torch.dtype,
        schemes: tuple[str, ...] = SCHEMES,
        make: Callable[[Device], Model] | None = None,
    ) -> None:
        """`schemes`: those that the device computes; `make`: makes the model where it is none of `config`.
        Raises StartError if layers cannot be offloaded as
        `start` says."""
        self.schemes = schemes
        self.make = make
        self.start = start
        self.config = config
        self.dtype = dtype
        self.meta = replace(device, torch_device=torch.device("meta"))
        offload = start.offload_setup.offload
        if offload is not None:
            sizes = layer_sizes(self._without_data(), config, self._checkpoint(start))
            layers = dict.fromkeys(offloaded_layers(offload, sizes), torch.device("cpu"))
            device = replace(device, layer_devices=layers)
        self.device = device

    def load(self, progress: Progress = without_progress, *, writes: bool = False) -> LoadedModel:
        """Makes the model and reads its weights, or takes what the device has kept of them. `writes`: what it
        packs of them is kept for later starts, if it keeps any. Raises ModelError."""
        self.device.memory.prepare_loading()
        model, num_bytes = self._complete_model(progress, writes=writes)
        offload = None
        if self.start.offload_setup.offload is not None:
            with torch.inference_mode():
                offload = LayerOffload(
                    self.device,
                    [model.layers[i] for i in self.device.layer_devices],
                    self.start.offload_setup.offload.ahead,
                )
            num_bytes += offload.buffer_bytes - offload.host_bytes
            log.get("start").info(
                "layers in host memory",
                layers=list(self.device.layer_devices),
                bytes=offload.host_bytes,
                buffer_bytes=offload.buffer_bytes,
            )
        compiled = None
        if self.start.compiled.is_enabled:
            progress("compile", 0, 0)
            assert is_piecewise(model), "options allow no compilation of other models"
            explains = self.start.compiled.explains
            compiled = compile_layers(model, self.device, self.dtype, explains=explains)
        return LoadedModel(model, num_bytes, compiled, offload)

    def _complete_model(self, progress: Progress, *, writes: bool) -> tuple[Model, int]:
        """The model with its weights, and their bytes. Where what was kept does not fit the model, it is
        discarded, and the weights are read."""
        kept, key = self.device.kept_weights, self._key()
        if kept is not None and key:
            try:
                return self._with_kept(kept, key, progress, writes=writes)
            except KeptMismatch as error:
                log.get("start").warning(
                    "kept weights do not fit the model, and are discarded", why=str(error)
                )
                kept.discard()
            except BaseException:
                kept.close(None)
                raise
        start, model = self.start, self._empty(self.device)
        return model, load(model, self.config, self._checkpoint(start), start.seed, progress)

    def _with_kept(
        self, kept: KeptWeights, key: str, progress: Progress, *, writes: bool
    ) -> tuple[Model, int]:
        """The model, with what was kept in place of the weights that it was made of, or with what is packed
        noted, to be kept. Raises KeptMismatch, ModelError."""
        start, model = self.start, self._empty(self.device)
        checkpoint = self._checkpoint(start)
        num_bytes = allocate(model, self.config, checkpoint)
        names = kept.open(key, writes=writes)
        before = {} if names else storages(model)
        fill(model, self.config, checkpoint, start.seed, progress, names)
        check_complete(tensors(model))
        is_settled = not names and self._key() == key  # else the files have changed while they were read
        kept.close(replaced(model, before, kept.packed_storages) if is_settled else None)
        return model, num_bytes

    def _key(self) -> str:
        """See checkpoint_key; empty: weights cannot be kept, or need not be. Raises ModelError."""
        start, device = self.start, self.device
        is_from_files = start.load_format not in ("dummy", *start.weight_functions)
        if device.kept_weights is None or not is_from_files:
            return ""
        try:
            files = weight_files(Path(start.model_path), start.load_format)
            if not device.kept_weights.keeps(sum(path.stat().st_size for path in files)):
                return ""
            rank = device.stage.index * device.collectives.size + device.collectives.rank
            return checkpoint_key(start, rank, str(self.dtype), self.config)
        except OSError:
            return ""  # to read the weights will say what is wrong

    def of_checkpoint(self, model_path: str, load_format: str) -> "WeightsLoader":
        """The loader for another checkpoint of the same model. Raises ModelError if it is of another model,
        or if its weights do not fit."""
        known = {*get_args(StoredAs), *READ_AS, "auto", "dummy", *self.start.weight_functions}
        if load_format not in known:
            raise ModelError(
                f"load_format {load_format} is not known; take one of {', '.join(sorted(known))}"
            )
        start = structs.replace(self.start, model_path=model_path, load_format=load_format)
        config = read_model(start, self.schemes, self.device.head_ranks.rank)
        different = [
            name
            for name in config.__struct_fields__
            if name not in FREE_FIELDS and getattr(config, name) != getattr(self.config, name)
        ]
        if different:
            raise ModelError(
                f"the checkpoint is of another model: config.json differs in {', '.join(different)}; "
                "start a server with it"
            )
        if load_format != "dummy":
            check_weights(self._without_data(), config, self._checkpoint(start))
        return WeightsLoader(replace(self.device, layer_devices={}), start, config, self.dtype, self.schemes)

    def read_experts(self, model: Model, prefix: str, weights: ExpertWeights) -> None:
        """Fills the weights of some experts of the layer whose names begin with `prefix`. Raises
        ModelError."""
        fill_experts(model, self.config, self._checkpoint(self.start), prefix, weights)

    def move_experts(self, layers: dict[int, Placement]) -> None:
        """Models that are made from now on have the experts of these layers so."""
        assert self.start.expert_places is not None, "experts that move have places"
        places = structs.replace(self.start.expert_places, layers=self.start.expert_places.layers | layers)
        self.start = structs.replace(self.start, expert_places=places)
        self.device = replace(self.device, expert_places=places)
        self.meta = replace(self.meta, expert_places=places)

    def _checkpoint(self, start: StartRank) -> Checkpoint:
        ranks = self.meta.collectives
        return Checkpoint(
            folder=Path(start.model_path),
            load_format=start.load_format,
            reading=start.reading,
            rank=ranks.rank,
            num_ranks=ranks.size,
            function=weight_function(start.load_format)
            if start.load_format in start.weight_functions
            else None,
        )

    def _without_data(self) -> Model:
        load_deferred()  # operators on tensors without data
        return self._empty(self.meta)

    def _empty(self, device: Device) -> Model:
        if self.make is not None:
            return self.make(device)
        return model_class(self.config)(device, self.dtype, self.config)
