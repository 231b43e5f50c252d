"""A causal language model of transformers, with our paged attention behind its interface for attention
(--model-impl transformers).

All of the model but attention is transformers' own code, on one rank: the body, whose output hidden states
are those behind the last norm, and what follows it up to logits (head, scale, cap). The body is found in a
trial run on the meta device: it is the first module that the model's forward calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.deferred_torch import load_deferred
from runtime.devices.base import Device, ForwardBatch
from runtime.errors import ModelError
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.pooling import PoolingMetadata
from runtime.layers.weight import Layer, PackedModules, Weight
from runtime.models.base import CompiledLayer, Renames
from runtime.models.checkpoint import TensorSlice
from runtime.models.config.media_config import sees_whole_images
from runtime.models.config.model_config import ModelConfig
from runtime.models.transformers_attention import (
    PAGED,
    TRIAL,
    AttendedLayer,
    PagedModule,
    Step,
    Trial,
    paged_attention,
    register,
)
from runtime.models.transformers_media import (
    TransformersMedia,
    attend_apart,
    attend_by_rows,
    check_arguments,
    outermost,
    text_model,
)
from runtime.models.transformers_weights import (
    CheckpointNames,
    allocate_tensors,
    ignored_weights,
    stored_tensors,
)

Given = tuple[object, ...]  # positional arguments of a module
Changed = tuple[Given, dict[str, object]] | None  # other arguments of a module; None: those that were given


class BodyOutput(tuple[Tensor]):
    """Output of a body as models read it: by index, or by name, of which only the hidden states are given."""

    @property
    def last_hidden_state(self) -> Tensor:
        """[1, N, hidden]."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        """None, as outputs that were not asked for: router logits, attentions, caches."""
        if name.startswith("__"):
            raise AttributeError(name)


class GivenHidden(nn.Module):
    """Stands where the body was: what follows in the model's forward computes logits of `hidden`."""

    hidden: Tensor

    def forward(self, *_: object, **__: object) -> BodyOutput:
        """The hidden states, [1, N, hidden], as the body returns its own."""
        return BodyOutput((self.hidden,))


class TransformersModel(Layer):
    """A decoder. See GenerativeModel."""

    packed_modules: PackedModules = {}
    renames: Renames = ()

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        """Raises ModelError for a model that cannot be served so."""
        assert config.transformers_json is not None
        if device.collectives.size > 1:
            raise ModelError(
                f"--tp-size {device.collectives.size}: transformers' code computes a model on one rank here; "
                "leave it out"
            )
        self.layers: list[Layer] = []
        self.causal_lm = build(config, dtype)
        text = self.causal_lm if config.media is None else text_model(self.causal_lm)
        self.embed = self.causal_lm.get_input_embeddings()
        self.sees_whole_images = sees_whole_images(config.media)
        if self.sees_whole_images:
            attend_by_rows(text)
        attended, body_name = try_run(self.causal_lm, text)
        check_attended(attended, config)
        self.names = CheckpointNames(self.causal_lm)
        allocate_tensors(self.causal_lm, device.torch_device)
        tensors = stored_tensors(self.causal_lm)
        self.weights = {name: self.names.weight(name, tensor) for name, tensor in tensors.items()}
        self.ignored_weights = ignored_weights(self.causal_lm)
        self.step, self.given = Step(), GivenHidden()
        self.attentions: list[Attention | MlaAttention] = [
            paged_attention(device, position, layer) for position, layer in enumerate(attended)
        ]
        self.attention_modules = attach(self.causal_lm, text, attended, self.attentions, self.step)
        self.sinks = [layer.sinks for layer in attended]
        parent, _, name = body_name.rpartition(".")
        whole = self.causal_lm.get_submodule(body_name)
        setattr(self.causal_lm.get_submodule(parent), name, self.given)
        self.body = whole if config.media is None else text
        self.media_encoder: TransformersMedia | None = None
        self.has_token_grids = config.media is not None and config.media.has_token_grids
        if config.media is not None:
            whole = self.causal_lm if whole is text else whole
            begins = [text, self.given]
            self.media_encoder = TransformersMedia(whole, begins, dtype, config.media.output_size)

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """See Layer.children."""
        yield from self.weights.items()

    def finish_loading(self) -> None:
        """Hands sinks to the attentions."""
        for attention, module, name in zip(self.attentions, self.attention_modules, self.sinks, strict=True):
            if name and isinstance(attention, Attention):
                sinks = module.get_parameter(name).float().contiguous()
                attention.scores = replace(attention.scores, sinks=sinks)

    def checkpoint_key(self, tensor_name: str) -> tuple[str, str]:
        """See NamesTensors."""
        return self.names.key(tensor_name)

    def taken_apart(self, source: TensorSlice) -> Iterator[TensorSlice]:
        """See TakesApart."""
        return self.names.taken_apart(source)

    def forward(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Tensor:
        """Hidden states behind the last norm, [T, hidden]."""
        inputs = {"input_ids": batch.token_ids[None]}
        if self.media_encoder is not None:
            inputs = {"inputs_embeds": self.embeddings(batch)[None]}
        positions = batch.positions[None]
        if self.has_token_grids:  # [3, 1, T]
            positions = batch.positions.view(len(batch.positions), 1, -1).expand(-1, -1, 3).permute(2, 1, 0)
        self.step.batch = batch
        try:
            out = self.body(**inputs, position_ids=positions, use_cache=False)
        finally:
            self.step.batch = None
        hidden: Tensor = out[0][0]
        return hidden

    def embeddings(self, batch: ForwardBatch) -> Tensor:
        """What the text model is given for a step's tokens, [T, hidden]: rows of files in place of
        placeholders, which need not be in the vocabulary."""
        if batch.embeds is None:
            found: Tensor = self.embed(batch.token_ids)
            return found
        places, rows = batch.embeds
        found = self.embed(batch.token_ids.index_fill(0, places, 0))
        return found.index_copy(0, places, rows.to(found.dtype))

    def hidden_states(self, hidden: Tensor) -> Tensor:
        """See GenerativeModel.hidden_states."""
        return hidden.float()

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocabulary]."""
        self.given.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self.causal_lm(input_ids=ids, use_cache=False).logits
        return logits[0].float()

    def pool(self, hidden: Tensor, pooling: PoolingMetadata) -> Tensor:
        """Never called: options refuse pooling of these models."""
        raise AssertionError("transformers' models do not pool here")


def build(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device. Raises ModelError where transformers does not make it of config.json."""
    assert config.transformers_json is not None
    load_deferred()  # operators on tensors without data
    fields = dict(config.transformers_json)
    model_class: type[PreTrainedModel] = getattr(transformers, config.architecture)
    if model_class._is_stateful:
        raise ModelError(
            f"{config.architecture} keeps states of texts, which --model-impl transformers does not serve"
        )
    if not model_class._can_set_attn_implementation():
        raise ModelError(
            f"{config.architecture} does not attend through transformers' interface for attention, which "
            "--model-impl transformers needs"
        )
    register()
    try:
        hf_config = model_class.config_class.from_dict(fields | {"use_cache": False})
        with torch.device("meta"):
            model = model_class._from_config(hf_config, dtype=dtype, attn_implementation=TRIAL)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(f"transformers makes no {config.architecture} of config.json: {error}") from error
    text = model if config.media is None else text_model(model)
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in text.modules()):
        raise ModelError(
            f"{config.architecture} counts positions from the number of its padding token on, which "
            "--model-impl transformers does not serve"
        )
    return model.eval().requires_grad_(False)


def try_run(model: PreTrainedModel, text: PreTrainedModel) -> tuple[list[AttendedLayer], str]:
    """Runs a model on the meta device. `text`: the model itself, or the text model in one that takes images
    or sounds. -> how its layers attend, in their order, and the name of the module whose output is the last
    hidden states. Raises ModelError for attention that pages do not have."""
    trial, names = Trial(), {module: name for name, module in model.named_modules()}
    called: list[nn.Module] = []
    for module in text.modules():
        if hasattr(module, "layer_idx"):
            module.runtime_trial = trial

    def note(module: nn.Module, positional: Given, named: dict[str, object]) -> Changed:
        called.append(module)
        if module is not text:
            return None
        check_arguments(type(model).__name__, named)
        # without a mask, it looks for several texts in positions, which have no numbers here
        return None if positional else ((), named | {"attention_mask": torch.ones(1, 2)})

    experts = model.config._experts_implementation
    model.config._experts_implementation = "batched_mm"  # the others count tokens on the host
    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True) for module in names if module is not model
    ]
    name = type(model).__name__
    try:
        with torch.device("meta"):
            ids, ones, positions = (
                torch.zeros(1, 2, dtype=torch.int64),
                torch.ones(1, 2),
                torch.arange(2)[None],
            )
            model(input_ids=ids, attention_mask=ones, position_ids=positions, use_cache=False)
    except ModelError as error:
        raise ModelError(f"--model-impl transformers does not serve {name}: {error}") from error
    except NotImplementedError as error:  # a tensor of the meta device has no numbers
        raise ModelError(
            f"--model-impl transformers does not serve {name}: its code reads numbers of a step on the host, "
            "as how many tokens an expert has"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(f"--model-impl transformers cannot run {name} over pages: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
        model.config._experts_implementation = experts
    if trial.errors:
        raise ModelError(f"--model-impl transformers does not serve {name}: {trial.errors[0]}")
    body = called[0] if text is model else outermost(model, text, called)
    return sorted(trial.layers, key=lambda layer: layer.index), names[body]


def check_attended(layers: list[AttendedLayer], config: ModelConfig) -> None:
    """Raises ModelError where transformers attends otherwise than config.json was read."""
    indices = [layer.index for layer in layers]
    if indices != list(range(config.num_layers)):
        raise ModelError(
            f"{config.architecture} attends {len(layers)} times a step through transformers' interface, with "
            f"{len(set(indices))} layers, and config.json has {config.num_layers}; --model-impl transformers "
            "serves models of which each layer attends once"
        )
    shapes = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) > 1:
        raise ModelError(
            f"layers of {config.architecture} have different numbers or sizes of heads, which --model-impl "
            "transformers does not serve"
        )
    for layer in layers:
        pairs = {
            "num_attention_heads": (layer.num_heads, config.num_heads),
            "num_key_value_heads": (layer.num_kv_heads, config.num_kv_heads),
            "head_dim": (layer.head_dim, config.head_dim),
            "sliding_window": (layer.window, config.windows[layer.index]),
        }
        for field, (computed, read) in pairs.items():
            if computed != read:
                raise ModelError(
                    f"config.json: {field} of layer {layer.index} is read as {read}, and transformers "
                    f"computes {computed}; set {field} (--json-model-override-args)"
                )


def attach(
    model: PreTrainedModel,
    text: PreTrainedModel,
    layers: list[AttendedLayer],
    attentions: Sequence[object],
    step: Step,
) -> list[nn.Module]:
    """Gives every attention module its pages, and switches the model or the text model in it to them.
    -> these modules"""
    paged = {
        layer.index: PagedModule(attention, step)
        for layer, attention in zip(layers, attentions, strict=True)
        if isinstance(attention, Attention)
    }
    for module in text.modules():
        if hasattr(module, "runtime_trial"):
            del module.runtime_trial
            module.runtime_attention = paged[int(module.layer_idx)]
    if text is model:
        model.config._attn_implementation = PAGED
    else:
        attend_apart(model, text)
    return [layer.module for layer in layers]
