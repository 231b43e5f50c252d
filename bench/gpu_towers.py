"""Towers of images and sounds on a GPU, with torch's attention and with our own (`--mm-attention-backend
sdpa` and `triton_attn`): milliseconds of an encoding of one file, its products' share of the bf16 peak, and
how far results are apart.

    python -m bench.gpu_towers          # on a GPU; half a minute, to gpu.jsonl
    python -m bench.gpu_towers --dry    # every line, tiny, in Triton's interpreter
"""

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from bench.gpu import Bench
from runtime.devices.base import Device
from runtime.devices.cpu.device import open_device as open_cpu
from runtime.devices.cuda.interpret import use_interpreter
from runtime.layers.weight import named_weights
from runtime.messages.media import MediaValues
from runtime.messages.ranks import StartRank
from runtime.models.config.audio_config import QwenAudioEncoder
from runtime.models.config.media_config import MediaConfig
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.models.vision.open_encoder import MediaEncoder, open_encoder
from runtime.models.vision.slices import finish

VL = QwenVlEncoder(
    placeholder_id=0,
    video_placeholder_id=1,
    hidden_size=1280,
    intermediate_size=3420,
    num_layers=32,
    num_heads=16,
    patch_size=14,
    num_frames=2,
    merge_size=2,
    activation="silu",
    output_size=3584,
    is_gated=True,
    window_patches=8,
    full_layers=(7, 15, 23, 31),
)
AUDIO = QwenAudioEncoder(
    placeholder_id=0,
    hidden_size=1280,
    intermediate_size=5120,
    num_layers=32,
    num_heads=20,
    num_mels=128,
    num_positions=1500,
    activation="gelu",
    output_size=3584,
)
SIDES: tuple[int, ...] = (32, 78)  # rows and columns of patches of an image: 448 and 1,092 pixels
TINY: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 64, "num_layers": 2, "num_heads": 2}


def image(config: QwenVlEncoder, side: int) -> tuple[MediaValues, float]:
    """An image of so many rows and columns of patches, and the operations of its encoding: products with
    weights, and those of attention, of whole images and of windows."""
    count, window = side * side, min(config.window_patches, side) ** 2
    shape = (count, 3, config.patch_size, config.patch_size)
    full = sum(config.is_full(index) for index in range(config.num_layers))
    seen = full * count + (config.num_layers - full) * window
    flops = 2.0 * count * config.num_weights + 4.0 * count * seen * config.hidden_size
    return media_of(shape, (1, side, side)), flops


def sound(config: QwenAudioEncoder) -> tuple[MediaValues, float]:
    """A sound of the greatest length, and the operations of its encoding."""
    count = config.num_positions
    flops = 2.0 * count * config.num_weights + 4.0 * count**2 * config.num_layers * config.hidden_size
    return media_of((config.num_mels, config.max_frames), (config.max_frames, 1, 1)), flops


def media_of(shape: tuple[int, ...], grid: tuple[int, int, int]) -> MediaValues:
    """A file of random values."""
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    return MediaValues(id=0, values=values.ravel(), shape=shape, grid=grid, num_rows=0)


def measure(
    bench: Bench, devices: dict[str, Device], config: MediaConfig, media: MediaValues, flops: float
) -> dict[str, Any]:
    """Figures of a tower with each attention. Both have the same weights."""
    dtype = torch.float32 if bench.is_dry else torch.bfloat16
    encoders = {name: open_encoder(device, dtype, config) for name, device in devices.items()}
    torch.manual_seed(0)
    weights = [named_weights(one) for one in encoders.values()]  # type: ignore[arg-type]
    first, *others = ([weight for _, weight in one] for one in weights)
    for weight, *rest in zip(first, *others, strict=True):
        weight.tensor.normal_(0, 0.02)
        for other in rest:
            other.tensor.copy_(weight.tensor)
    figures: dict[str, Any] = {}
    results = []
    with torch.inference_mode():
        for name, encoder in encoders.items():
            call = partial(encoded, encoder, media)
            results.append(call()[0].float())
            seconds = bench.seconds(call)
            figures[name] = {"ms": round(seconds * 1e3, 2), "of_peak": round(flops / seconds / bench.peak, 3)}
    expected, found = results
    apart = (found - expected).abs().max() / expected.abs().max()
    return figures | {"apart": round(float(apart), 5)}


def encoded(encoder: MediaEncoder, media: MediaValues) -> list[Tensor]:
    """The rows of one file."""
    return finish(encoder.slices([media]))


def devices_of(bench: Bench) -> dict[str, Device]:
    """The device with each attention of towers."""
    from runtime.devices.cuda.kernels.launch import INTERPRETER, gpu_of
    from runtime.devices.cuda.towers import TritonTowers

    start = StartRank(
        device="cpu" if bench.is_dry else "cuda",
        model_path="",
        dtype="auto",
        load_format="dummy",
        tp_size=1,
        page_size=64,
        max_slots=1,
        max_len=64,
        max_step_tokens=64,
        memory_fraction=0.9,
        max_total_tokens=None,
        num_threads=None,
        rendezvous="",
        seed=0,
    )
    if bench.is_dry:
        device, gpu = open_cpu(start, 0, torch.float32), INTERPRETER
    else:
        from runtime.devices.cuda.device import open_device

        device, gpu = open_device(start, 0, torch.bfloat16), gpu_of(bench.torch_device)
    return {"sdpa": device, "triton_attn": replace(device, tower_attention=TritonTowers(gpu))}


def main() -> None:
    """Measures all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.dry:
        use_interpreter()
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU; use --dry")
    bench = Bench(args.dry)
    figures, devices = bench.figures("towers"), devices_of(bench)
    vision, audio, sides = VL, AUDIO, SIDES
    if bench.is_dry:
        vision = structs.replace(VL, **TINY, patch_size=4, window_patches=4, full_layers=(1,))
        audio, sides = structs.replace(AUDIO, **TINY, num_mels=20, num_positions=50), (6,)
    for side in sides:
        given = image(vision, side)
        figures[f"Qwen2.5-VL-7B: {side} x {side} patches"] = measure(bench, devices, vision, *given)
    figures["Qwen2-Audio: 30 s"] = measure(bench, devices, audio, *sound(audio))


if __name__ == "__main__":
    main()
