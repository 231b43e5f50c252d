"""Latent attention (LatentSpec of devices/decoder_spec.py) as phases of a program."""

import ctypes
from collections.abc import Callable

from torch import Tensor

from runtime.devices.cpu.kernels.library import LatentBuffers
from runtime.devices.cpu.latents import PackedUp, fits, latents_of
from runtime.devices.cpu.program import Buffer, Program
from runtime.devices.decoder_spec import LatentSpec, LinearSpec, NormSpec

# adds a product behind a norm to the program: source, norm, weight, out
AddLinear = Callable[[Buffer, NormSpec | None, LinearSpec, Buffer], None]


def latents_problem(spec: LatentSpec, keys: Tensor) -> str | None:
    """What the kernels do not compute of this attention over `keys`; None: they compute it."""
    if not isinstance(spec.up, PackedUp):
        return "an up-projection of latents that the kernels do not compute"
    if not fits(spec.rank, spec.rope_dim, keys.dtype):
        return f"latents of {spec.rank} and {spec.rope_dim} as {keys.dtype}"
    return None


class LatentPhases:
    """Adds layers with latent attention to a program. They share buffers."""

    def __init__(self, program: Program, rotary: int) -> None:
        self.program = program
        self.rotary = rotary
        self.rows: LatentBuffers | None = None
        self.latents: Buffer | None = None  # of queries
        self.queries: Buffer | None = None

    def add(
        self, spec: LatentSpec, kv: tuple[Tensor, Tensor], down: Buffer, out: Buffer, linear: AddLinear
    ) -> None:
        """From the output of `spec.down` to that of attention. `latents_problem(spec, ...)` is None."""
        up, program = spec.up, self.program
        assert isinstance(up, PackedUp)
        layer = latents_of(up, *kv, spec.scale)
        layer.norm, layer.eps, layer.rotary = program.keep(spec.kv_norm.weight), spec.kv_norm.eps, self.rotary
        program.kept.extend((up, kv))
        queries, latents = down, None
        if spec.queries is not None:
            self.latents = latents = self.latents or program.buffer(spec.queries.inputs)
            self.queries = queries = self.queries or program.buffer(spec.queries.outputs)
        program.functions.program_keep_latents(program.handle, down, latents, ctypes.addressof(layer))
        if spec.queries is not None and latents is not None:
            linear(latents, spec.q_norm, spec.queries, queries)
        rows = self.rows = self.rows or self._buffers(up, spec.rope_dim)
        program.functions.program_latent_attention(
            program.handle, queries, out, ctypes.addressof(rows), ctypes.addressof(layer)
        )

    def _buffers(self, up: PackedUp, rope_dim: int) -> LatentBuffers:
        program, heads = self.program, up.num_heads
        return LatentBuffers(
            inputs=program.buffer_for(up.keys, heads),
            absorbed=program.buffer(up.rank + rope_dim, heads),
            attended=program.buffer(up.rank, heads),
            summed=program.buffer_for(up.values, heads),
        )
