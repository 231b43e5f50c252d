"""A decoder computed as several programs, between which its hidden states are seen."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import ForwardBatch
from runtime.devices.decoder_spec import DecoderSpec, Forwarded, ForwardProgram, ForwardPrograms


class Segments:
    """A ForwardProgram that also gives the inputs of some layers: each program begins with what the one
    before it gives, in place of embeddings."""

    def __init__(self, programs: list[tuple[int, ForwardProgram]], aux_layers: tuple[int, ...]) -> None:
        """`programs`: with the layer that each ends before, in order."""
        self.programs = programs
        self.aux_layers = aux_layers

    def forward(
        self, batch: ForwardBatch, samples: np.ndarray, lora_slots: np.ndarray | None
    ) -> Forwarded | None:
        """See ForwardProgram; the hidden states of a token are the last ones, then those of `aux_layers`."""
        places = torch.arange(len(batch.token_ids))
        found: dict[int, Tensor] = {}
        forwarded: Forwarded | None = None
        begin = 0
        for end, program in self.programs:
            part = replace(batch, kv=batch.kv[begin:end], page_saves=None)
            if forwarded is not None:
                part = replace(part, embeds=(places, forwarded.hidden), page_loads=None)
            is_last = end == self.programs[-1][0]
            forwarded = program.forward(part, samples if is_last else samples[:0], lora_slots)
            if forwarded is None:
                return None
            found[end], begin = forwarded.hidden, end
        assert forwarded is not None, "a decoder has layers"
        return Forwarded(
            torch.cat((forwarded.hidden, *(found[layer] for layer in self.aux_layers)), dim=1),
            forwarded.logits,
        )


def open_program(
    programs: ForwardPrograms, spec: DecoderSpec, kv: list[tuple[Tensor, ...]], aux_layers: tuple[int, ...]
) -> ForwardProgram | None:
    """The program of a decoder that also gives the inputs of `aux_layers`; None: there is none."""
    if not aux_layers:
        return programs.open(spec, kv)
    if 0 in aux_layers or any(layer.attention is None or layer.mixer is not None for layer in spec.layers):
        return None
    opened, begin = list[tuple[int, ForwardProgram]](), 0
    for end in sorted({*aux_layers, len(spec.layers)}):
        head = spec.head if end == len(spec.layers) else None
        program = programs.open(replace(spec, layers=spec.layers[begin:end], head=head), kv[begin:end])
        if program is None:
            return None
        opened.append((end, program))
        begin = end
    return Segments(opened, aux_layers)
