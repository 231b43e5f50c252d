"""The encoders of sounds of Qwen2.5-Omni (Xu et al., 2025) and Qwen3-Omni (Xu et al., 2025): Whisper's blocks
over parts of a spectrogram, each with positions of its own, so that sounds may be long."""

import torch
from torch import Tensor
from torch.nn.functional import conv2d, gelu, pad

from runtime.devices.base import Device
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedLinear, replicated_weight
from runtime.layers.weight import Layer
from runtime.models.audio.whisper import EPS, Convolution, WhisperLayer
from runtime.models.config.audio_config import STRIDE
from runtime.models.config.omni_config import OmniAudio
from runtime.models.vision.activations import activate
from runtime.models.vision.slices import Slices, through, within

LONGEST_WAVE = 10000.0  # of the sines that positions are made of
PARTS_AT_ONCE = 32  # that go through convolutions over bins together
KERNEL = 3  # bins and frames that a convolution sees


def sinusoids(count: int, size: int, device: torch.device) -> Tensor:
    """Sines, then cosines, of positions: float32 [count, size] (Vaswani et al., 2017)."""
    half = size // 2
    step = torch.log(torch.tensor(LONGEST_WAVE, dtype=torch.float64)).item() / max(half - 1, 1)
    rates = torch.exp(-step * torch.arange(half, device=device).float())
    angles = torch.arange(count, device=device)[:, None] * rates[None, :]
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def in_parts(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[B, ..., L] as whole parts of `size`, [B * parts, ..., size], and what is left over, [B, ..., rest]."""
    whole = x.shape[-1] // size * size
    parts = x[..., :whole].unflatten(-1, (-1, size) if whole else (0, size)).movedim(-2, 1).flatten(0, 1)
    return parts, x[..., whole:]


class PartTower(Layer):
    """The encoder of Qwen2.5-Omni: positions attend to those of their part, and are averaged in pairs."""

    def __init__(self, device: Device, dtype: torch.dtype, config: OmniAudio) -> None:
        size = config.hidden_size
        self.part_frames = config.part_frames
        self.conv1 = Convolution(device, dtype, config.num_mels, size, 1)
        self.conv2 = Convolution(device, dtype, size, size, STRIDE)
        self.layers = [WhisperLayer(device, dtype, config) for _ in range(config.num_layers)]
        self.ln_post = LayerNorm(device, dtype, size, EPS)
        self.proj = ReplicatedLinear(device, dtype, size, config.text_size, bias=True)

    def slices(self, mels: Tensor) -> Slices[Tensor]:
        """Spectrograms [B, mels, frames] -> [B, rows, text model's size]."""
        parts, rest = in_parts(mels, self.part_frames)
        split = 1 - rest.shape[-1] / mels.shape[-1]
        found = []
        if len(parts):
            x = yield from within(self._attended(parts), 0.0, split)
            found.append(x.unflatten(0, (len(mels), -1)).flatten(1, 2))
        if rest.shape[-1]:
            found.append((yield from within(self._attended(rest), split, 1.0)))
        x = torch.cat(found, dim=1)
        x = x[:, : x.shape[1] // STRIDE * STRIDE]
        return self.proj.forward(self.ln_post.forward((x[:, ::STRIDE] + x[:, 1::STRIDE]) / STRIDE))

    def _attended(self, parts: Tensor) -> Slices[Tensor]:
        """[N, mels, frames] -> [N, positions, size]."""
        x = gelu(self.conv2.forward(gelu(self.conv1.forward(parts)))).transpose(1, 2)
        x = x + sinusoids(x.shape[1], x.shape[2], x.device).to(x.dtype)
        return (yield from through(self.layers, x))


class PlaneConvolution(Layer):
    """A convolution over bins and frames that halves both, with a bias."""

    def __init__(self, device: Device, dtype: torch.dtype, inputs: int, outputs: int) -> None:
        self.weight = replicated_weight(device, dtype, outputs, inputs, KERNEL, KERNEL)
        self.bias = replicated_weight(device, dtype, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs, bins, frames] -> [N, outputs, ceil(bins / 2), ceil(frames / 2)]."""
        return conv2d(x, self.weight.tensor, self.bias.tensor, stride=STRIDE, padding=KERNEL // 2)


class WindowTower(Layer):
    """The encoder of Qwen3-Omni: convolutions within parts, attention within windows of several."""

    def __init__(self, device: Device, dtype: torch.dtype, config: OmniAudio) -> None:
        size, channels = config.hidden_size, config.num_channels
        self.config = config
        self.conv2d1 = PlaneConvolution(device, dtype, 1, channels)
        self.conv2d2 = PlaneConvolution(device, dtype, channels, channels)
        self.conv2d3 = PlaneConvolution(device, dtype, channels, channels)
        self.conv_out = ReplicatedLinear(device, dtype, channels * config.num_folds, size, bias=False)
        self.layers = [WhisperLayer(device, dtype, config) for _ in range(config.num_layers)]
        self.ln_post = LayerNorm(device, dtype, size, EPS)
        self.proj1 = ReplicatedLinear(device, dtype, size, size, bias=True)
        self.proj2 = ReplicatedLinear(device, dtype, size, config.text_size, bias=True)

    def slices(self, mels: Tensor) -> Slices[Tensor]:
        """Spectrograms [B, mels, frames] -> [B, rows, text model's size]. Silence fills the last part, if it
        is not the only one."""
        frames, part = mels.shape[-1], self.config.part_frames
        if frames > part:
            mels = pad(mels, (0, -frames % part))
        parts, rest = in_parts(mels, part)
        folded = [self._folded(one) for one in (parts if len(parts) else rest).split(PARTS_AT_ONCE)]
        x = torch.cat(folded).unflatten(0, (len(mels), -1)).flatten(1, 2)
        width = folded[0].shape[1] * self.config.window_parts
        count = self.config.num_rows(frames)
        windows, rest = in_parts(x[:, :count].transpose(1, 2), width)
        split = 1 - rest.shape[-1] / count
        found = []
        if len(windows):
            x = yield from within(self._attended(windows), 0.0, split)
            found.append(x.unflatten(0, (len(mels), -1)).flatten(1, 2))
        if rest.shape[-1]:
            found.append((yield from within(self._attended(rest), split, 1.0)))
        x = self.proj1.forward(self.ln_post.forward(torch.cat(found, dim=1)))
        return self.proj2.forward(activate(self.config.activation, x))

    def _folded(self, parts: Tensor) -> Tensor:
        """[N, mels, frames] -> [N, positions, size]."""
        x = parts.unsqueeze(1)
        for convolution in (self.conv2d1, self.conv2d2, self.conv2d3):
            x = gelu(convolution.forward(x))
        x = self.conv_out.forward(x.permute(0, 3, 1, 2).flatten(2))
        return x + sinusoids(x.shape[1], x.shape[2], x.device).to(x.dtype)

    def _attended(self, windows: Tensor) -> Slices[Tensor]:
        """[N, size, positions] -> [N, positions, size]."""
        return (yield from through(self.layers, windows.transpose(1, 2)))
