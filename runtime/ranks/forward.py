"""The forward pass of a step, by the largest unit that the device has for it."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.devices.decoder_spec import Forwarded, ForwardProgram
from runtime.models.base import Model
from runtime.models.decoder_specs import decoder_spec
from runtime.ranks.layer_watch import LayerWatch
from runtime.ranks.piecewise_graphs import PiecewiseGraphs
from runtime.ranks.segments import open_program
from runtime.ranks.side_by_side import forward_side_by_side
from runtime.ranks.two_batches import forward_in_turns


class Forward:
    """Computes steps that no graph has as a whole: by the device's program of the model, by graphs between
    the attentions, or layer by layer."""

    def __init__(self, device: Device, watch: LayerWatch | None = None) -> None:
        """`watch`: None: single layers are not watched."""
        self.device = device
        self.watch = watch
        self.opened: tuple[Model, int] | None = None  # the model of `program`, and where its cache is
        self.program: ForwardProgram | None = None

    def compute(
        self,
        model: Model,
        batch: ForwardBatch,
        samples: np.ndarray,
        piecewise: PiecewiseGraphs | None,
        lora_slots: np.ndarray | None,
        decodes: Callable[[], Tensor] | None = None,
    ) -> Forwarded:
        """`samples`: int64 [N], places of the tokens behind which something is sampled; `lora_slots`: int32
        [T], -1 for tokens without an adapter; None: no token has one; `decodes`: computes those of a step
        with prompts beside them, None: layer by layer."""
        if self.watch is not None:
            return Forwarded(self.watch.forward(model, batch))
        device = self.device
        if batch.micro_batches is not None and device.partitions is not None and device.streams is not None:
            return Forwarded(forward_side_by_side(device.streams, device.partitions, model, batch, decodes))
        if batch.micro_batches is not None:
            return Forwarded(forward_in_turns(self.device, model, batch.micro_batches))
        program = self._program(model, batch)
        forwarded = None if program is None else program.forward(batch, samples, lora_slots)
        if forwarded is not None:
            return forwarded
        size = None if piecewise is None else piecewise.size_for(batch)
        if piecewise is None or size is None:
            return Forwarded(model.forward(batch))
        return Forwarded(piecewise.forward(size, batch, lora_slots))

    def _program(self, model: Model, batch: ForwardBatch) -> ForwardProgram | None:
        """The program of this model and cache, made when either is another than before."""
        if self.device.programs is None or not (batch.kv or batch.states):
            return None
        cache = batch.kv[0][0].data_ptr() if batch.kv else 0  # states say by themselves where they are
        if self.opened is None or self.opened[0] is not model or self.opened[1] != cache:
            spec = decoder_spec(model)
            aux = getattr(model, "aux_layers", ())
            self.program = None
            if spec is not None:
                self.program = open_program(self.device.programs, spec, batch.kv, aux)
            self.opened = model, cache
        return self.program

    def forget(self) -> None:
        """Drops what refers to a model and a cache that are released."""
        self.opened = self.program = None
