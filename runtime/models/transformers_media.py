"""Encoders of images and sounds that are transformers' own code, and the text model beside them
(--model-impl transformers).

A model of transformers makes embeddings of a prompt with its images, and gives these to its text model. An
encoding is what the text model would be given for the tokens of one file: it is run up to there, and the rest
of its forward is left out. In steps the text model is run alone, behind our paged attention.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.errors import ModelError
from runtime.layers.upload import upload
from runtime.layers.weight import Layer, Weight
from runtime.messages.media import MediaValues
from runtime.messages.packed_arrays import unpack
from runtime.models.base import Renames
from runtime.models.transformers_attention import PAGED
from runtime.models.vision.slices import Slices

# arguments of text models that steps have, or that nothing depends on here
STEP_ARGUMENTS = (
    "attention_mask",
    "cache",
    "cache_position",
    "input_ids",
    "inputs_embeds",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "return_dict",
    "use_cache",
)


class EmbeddingsMade(Exception):
    """Raised where the text model would begin: what was wanted is there."""

    def __init__(self, embeds: Tensor) -> None:
        """`embeds`: [1, tokens, hidden]."""
        self.embeds = embeds


class TransformersMedia:
    """See MediaEncoder. Its weights are those of the whole model."""

    renames: Renames = ()

    def __init__(self, whole: nn.Module, begins: Sequence[nn.Module], dtype: torch.dtype, size: int) -> None:
        """`whole`: what makes embeddings and calls the text model; `begins`: modules that are called with all
        embeddings, of which the first that is called ends an encoding."""
        self.dtype, self.output_size = dtype, size
        self._whole = whole
        self._is_encoding = False
        for module in begins:
            module.register_forward_pre_hook(self._stop, with_kwargs=True)

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """None: see TransformersModel."""
        return iter(())

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The rows [tokens, hidden] of each file, one after the other: files of one shape may hold images of
        different ones. transformers' code does not stop on the way: only between files."""
        found = []
        for one in media:
            found.append(self._rows(one))
            yield len(found) / len(media)
        return found

    def _rows(self, one: MediaValues) -> Tensor:
        device = next(self._whole.parameters()).device
        inputs = {
            name: upload(array.copy(), device) for name, array in unpack(one.values).items() if array.size
        }
        inputs = {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        inputs["input_ids"] = inputs["input_ids"][None]
        self._is_encoding = True
        try:
            self._whole(**inputs, use_cache=False)
        except EmbeddingsMade as made:
            return made.embeds[0]
        finally:
            self._is_encoding = False
        raise AssertionError("the text model was called in the trial run")

    def _stop(self, _: nn.Module, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self._is_encoding:
            raise EmbeddingsMade(named["inputs_embeds"])


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The layers of the text model below a model that takes images or sounds."""
    found = model
    while (inner := found.get_decoder()) is not found:
        found = inner
    return found


def outermost(model: PreTrainedModel, text: nn.Module, called: Sequence[nn.Module]) -> nn.Module:
    """The first of the modules that were `called`, in their order, that has the text model and no head: what
    follows it makes logits of its output."""
    head = model.get_output_embeddings()
    for module in called:
        below = list(module.modules())
        if any(one is text for one in below) and not any(one is head for one in below):
            return module
    return text


def check_arguments(name: str, given: Mapping[str, object]) -> None:
    """Raises ModelError for a text model that is `given` more than steps have."""
    others = sorted(one for one, value in given.items() if value is not None and one not in STEP_ARGUMENTS)
    if others:
        raise ModelError(
            f"--model-impl transformers does not serve {name}: its text model is given {', '.join(others)} "
            "besides embeddings"
        )
    if given.get("inputs_embeds") is None:
        raise ModelError(
            f"--model-impl transformers does not serve {name} with images or sounds: its text model is given "
            "ids of tokens in place of embeddings; set --enable-multimodal false"
        )


def attend_by_rows(text: nn.Module) -> None:
    """Has layers that see whole prompts be taken for causal ones: which tokens see each other, each step says
    (AttentionRows.spans)."""
    for module in text.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True


def attend_apart(model: PreTrainedModel, text: PreTrainedModel) -> None:
    """Has the text model attend over pages, and towers as transformers' own code does by default."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = "sdpa" if module._supports_sdpa else "eager"
    text.config._attn_implementation = PAGED
