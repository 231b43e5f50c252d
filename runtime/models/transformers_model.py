"""A causal language model of transformers, with our paged attention behind its interface for attention
(--model-impl transformers).

All of the model but attention is transformers' own code, on one rank: the body, whose output hidden states
are those behind the last norm, and what follows it up to logits (head, scale, cap). The body is found in a
trial run on the meta device: it is the first module that the model's forward calls.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from runtime.devices.base import Device, ForwardBatch
from runtime.errors import ModelError
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.pooling import PoolingMetadata
from runtime.layers.weight import Layer, PackedModules, SourceTensor, Weight, replicated_shard
from runtime.models.base import CompiledLayer, Renames
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
        attended, body_name = try_run(self.causal_lm)
        check_attended(attended, config)
        self.renamings = renamings(self.causal_lm)
        allocate_tensors(self.causal_lm, device.torch_device)
        self.tensors = stored_tensors(self.causal_lm)
        self.weights = {name: weight_of(tensor) for name, tensor in self.tensors.items()}
        self.ignored_weights = ignored_weights(self.causal_lm)
        self.step, self.given = Step(), GivenHidden()
        self.attentions: list[Attention | MlaAttention] = [
            paged_attention(device, position, layer) for position, layer in enumerate(attended)
        ]
        self.attention_modules = attach(self.causal_lm, attended, self.attentions, self.step)
        self.sinks = [layer.sinks for layer in attended]
        parent, _, name = body_name.rpartition(".")
        self.body = self.causal_lm.get_submodule(body_name)
        setattr(self.causal_lm.get_submodule(parent), name, self.given)

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
        """Weight name and part that a checkpoint's tensor fills: by transformers' renames, with the prefix of
        the body or without."""
        prefix = self.causal_lm.base_model_prefix
        return rename_source_key(tensor_name, self.renamings, [], prefix, self.tensors)[0], ""

    def forward(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Tensor:
        """Hidden states behind the last norm, [T, hidden]."""
        self.step.batch = batch
        try:
            out = self.body(
                input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False
            )
        finally:
            self.step.batch = None
        hidden: Tensor = out[0][0]
        return hidden

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
    return model.eval().requires_grad_(False)


def renamings(model: PreTrainedModel) -> list[WeightRenaming]:
    """Other names of the model's tensors in checkpoints. Raises ModelError where tensors are not only named
    otherwise there."""
    transforms = get_model_conversion_mapping(model)
    names = list(model.state_dict())
    for one in transforms:
        patterns = [] if isinstance(one, WeightRenaming) else [*one.target_patterns]
        if any(re.search(pattern, name) for pattern in patterns for name in names):
            raise ModelError(
                f"checkpoints of {type(model).__name__} keep {patterns[0]} in other shapes than transformers "
                "computes with; --model-impl transformers does not serve it"
            )
    return [one for one in transforms if isinstance(one, WeightRenaming)]


def try_run(model: PreTrainedModel) -> tuple[list[AttendedLayer], str]:
    """Runs a model on the meta device. -> how its layers attend, in their order, and the name of its body.
    Raises ModelError for attention that pages do not have."""
    trial, names, called = Trial(), {module: name for name, module in model.named_modules()}, []
    for module in names:
        if hasattr(module, "layer_idx"):
            module.runtime_trial = trial

    def note(module: nn.Module, _: object) -> None:
        called.append(names[module])

    experts = model.config._experts_implementation
    model.config._experts_implementation = "batched_mm"  # the others count tokens on the host
    hooks = [module.register_forward_pre_hook(note) for module in names if module is not model]
    name = type(model).__name__
    try:
        with torch.device("meta"):
            ids, ones, positions = (
                torch.zeros(1, 2, dtype=torch.int64),
                torch.ones(1, 2),
                torch.arange(2)[None],
            )
            model(input_ids=ids, attention_mask=ones, position_ids=positions, use_cache=False)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(f"--model-impl transformers cannot run {name} over pages: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
        model.config._experts_implementation = experts
    if trial.errors:
        raise ModelError(f"--model-impl transformers does not serve {name}: {trial.errors[0]}")
    return sorted(trial.layers, key=lambda layer: layer.index), called[0]


def check_attended(layers: list[AttendedLayer], config: ModelConfig) -> None:
    """Raises ModelError where transformers attends otherwise than config.json was read."""
    if [layer.index for layer in layers] != list(range(config.num_layers)):
        raise ModelError(
            f"{config.architecture} attends through transformers' interface {len(layers)} times, and "
            f"config.json has {config.num_layers} layers; --model-impl transformers does not serve it"
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


def allocate_tensors(model: PreTrainedModel, torch_device: torch.device) -> None:
    """Gives parameters and buffers memory on the device. Tied parameters stay one; buffers that no checkpoint
    has, as frequencies of rotary positions, are computed."""
    made: dict[int, nn.Parameter] = {}
    kept: list[nn.Parameter] = []  # so that no id is used twice
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                made[id(old)] = nn.Parameter(
                    torch.empty(old.shape, dtype=old.dtype, device=torch_device), requires_grad=False
                )
                made[id(old)]._is_hf_initialized = True  # type: ignore[attr-defined]
                kept.append(old)
            module._parameters[name] = made[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=torch_device)
    if torch_device.type != "meta":
        with torch.no_grad():
            model.initialize_weights()


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors that a checkpoint has, by their names; one name for tied parameters."""
    parameters = dict(model.named_parameters())
    everywhere = dict(model.named_parameters(remove_duplicate=False))
    return parameters | {
        name: tensor for name, tensor in model.state_dict().items() if name not in everywhere
    }


def weight_of(tensor: Tensor) -> Weight:
    """A tensor as the loader fills it: whole."""
    tensor = tensor.detach()
    if tensor.ndim == 0:
        source = SourceTensor(
            (), 0, replicated_shard(1), load=lambda reader: tensor.copy_(reader[...]), other_shapes=((1,),)
        )
    else:
        source = SourceTensor(tuple(tensor.shape), 0, replicated_shard(len(tensor)))
    return Weight(tensor, {"": source})


def ignored_weights(model: PreTrainedModel) -> tuple[str, ...]:
    """Patterns of tensors in checkpoints that the model does not read: those that transformers names, and
    copies of tied parameters."""
    first = set(dict(model.named_parameters()))
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = [f"(^|\\.){re.escape(name)}$" for name in every if name not in first]
    named = sorted(model._keys_to_ignore_on_load_unexpected or ())
    return (*named, *tied, r"rotary_emb\.inv_freq$", r"position_ids$")


def attach(
    model: PreTrainedModel, layers: list[AttendedLayer], attentions: Sequence[object], step: Step
) -> list[nn.Module]:
    """Gives every attention module its pages, and switches the model to them. -> these modules"""
    paged = {
        layer.index: PagedModule(attention, step)
        for layer, attention in zip(layers, attentions, strict=True)
        if isinstance(attention, Attention)
    }
    for module in model.modules():
        if hasattr(module, "runtime_trial"):
            del module.runtime_trial
            module.runtime_attention = paged[int(module.layer_idx)]
    model.config._attn_implementation = PAGED
    return [layer.module for layer in layers]
