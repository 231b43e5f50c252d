"""Recurrent layers as data (MixerSpec of devices/decoder_spec.py)."""

from itertools import accumulate

from runtime.devices.decoder_spec import Columns, LinearSpec, MixerSpec, NormSpec
from runtime.devices.recurrent import RecurrentKernel
from runtime.layers.recurrent.gated_delta import GatedDeltaMixer
from runtime.layers.recurrent.mamba2 import Mamba2Mixer
from runtime.layers.recurrent.short_conv import ShortConvMixer
from runtime.models.linear_spec import linear_spec

Sources = tuple[Columns, ...]


def mixer_spec(mixer: object, norm: NormSpec, out_scale: float) -> MixerSpec | None:
    """The spec of a loaded mixer behind a norm, with a factor on what it returns. None: its kind has none, or
    the device has no kernel for it."""
    if isinstance(mixer, GatedDeltaMixer) and mixer.kernel is not None:
        return _delta_spec(mixer, mixer.kernel, norm, out_scale)
    if isinstance(mixer, Mamba2Mixer) and mixer.kernel is not None:
        sizes = mixer.in_proj.sizes
        factors = mixer.config.multipliers or (1.0,) * len(sizes)
        gate, *mixed, step = _parts(sizes, factors)
        return _spec(
            (linear_spec(mixer.in_proj),),
            mixer.kernel,
            mixer.place,
            (_joined(mixed), (gate,), (), (step,), ()),
            norm,
            linear_spec(mixer.out_proj, out_scale),
        )
    if isinstance(mixer, ShortConvMixer) and mixer.kernel is not None:
        gate_in, gate_out, mixed = _parts(mixer.in_proj.sizes, (1.0,) * 3)
        sources = (mixed,), (gate_out,), (), (), (gate_in,)
        in_proj, out_proj = linear_spec(mixer.in_proj), linear_spec(mixer.out_proj, out_scale)
        return _spec((in_proj,), mixer.kernel, mixer.place, sources, norm, out_proj)
    return None


def _spec(
    projections: tuple[LinearSpec, ...],
    kernel: RecurrentKernel,
    place: int,
    sources: tuple[Sources, Sources, Sources, Sources, Sources],
    norm: NormSpec,
    o: LinearSpec,
) -> MixerSpec:
    """`sources`: of mixed, gate, rate, step and input gate."""
    mixed, gate, rate, step, input_gate = sources
    return MixerSpec(norm, projections, kernel, place, mixed, gate, rate, step, input_gate, o)


def _parts(sizes: list[int], factors: tuple[float, ...]) -> list[Columns]:
    """Parts of the first projection, one behind another."""
    begins = accumulate(sizes, initial=0)
    return [
        Columns(0, begin, size, factor) for begin, size, factor in zip(begins, sizes, factors, strict=False)
    ]


def _joined(parts: list[Columns]) -> Sources:
    """Parts that lie one behind another, as one where all have the same factor."""
    first = parts[0]
    if any(part.factor != first.factor for part in parts):
        return tuple(parts)
    return (Columns(first.projection, first.begin, sum(part.count for part in parts), first.factor),)


def _delta_spec(
    mixer: GatedDeltaMixer, kernel: RecurrentKernel, norm: NormSpec, out_scale: float
) -> MixerSpec:
    config, values = mixer.config, mixer.sizes[2] // mixer.config.value_dim
    o = linear_spec(mixer.out_proj, out_scale)
    if config.layout != "by_head":
        projections = mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_ba
        sources = (
            (Columns(0, 0, sum(mixer.sizes)),),
            (Columns(1, 0, mixer.sizes[2]),),
            (Columns(2, 0, values),),
            (Columns(2, values, values),),
            (),
        )
        return _spec(tuple(map(linear_spec, projections)), kernel, mixer.place, sources, norm, o)
    heads, shared = mixer.sizes[0] // config.key_dim, mixer.shared
    sizes = [config.key_dim, config.key_dim, *[shared * config.value_dim] * 2]
    *qkv, gate = (
        tuple(Columns(0, head * sum(sizes) + begin, size) for head in range(heads))
        for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
    )
    rate, step = (
        tuple(Columns(1, (2 * head + part) * shared, shared) for head in range(heads)) for part in (0, 1)
    )
    mixed = tuple(column for part in qkv for column in part)
    projections = linear_spec(mixer.in_proj_qkvz), linear_spec(mixer.in_proj_ba)
    return _spec(projections, kernel, mixer.place, (mixed, gate, rate, step, ()), norm, o)
