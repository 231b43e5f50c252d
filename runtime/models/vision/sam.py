"""The vision transformer of Segment Anything (SAM; Kirillov et al., 2023) as DeepSeek-OCR 2 has it: patches
attend within windows in most layers, by their distances in rows and columns, and convolutions make a smaller
picture of what it gives.

Every rank has all of its weights. Pictures are [B, rows, columns, size].
"""

import torch
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, pad, scaled_dot_product_attention

from runtime.devices.base import Device
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedLinear, replicated_weight
from runtime.layers.weight import Layer
from runtime.models.config.deepseek_ocr_config import SamTower
from runtime.models.vision.activations import activate
from runtime.models.vision.clip import cut_patches
from runtime.models.vision.gemma_vision import SiglipProjection
from runtime.models.vision.slices import Slices, layer_work, parts_done

NECK_EPS = 1e-6
SAM_SHRINKS = 16  # patches that SamDown makes one vector of


class SamAttention(Layer):
    """Attention of all patches of a picture, or a window, to each other."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: SamTower, index: int) -> None:
        size, head = tower.hidden_size, tower.hidden_size // tower.num_heads
        self.num_heads, self.has_distances = tower.num_heads, tower.has_relative_positions
        self.qkv = ReplicatedLinear(device, dtype, size, 3 * size, bias=tower.has_qkv_bias)
        self.proj = ReplicatedLinear(device, dtype, size, size, bias=True)
        if self.has_distances:
            count = 2 * tower.attended_side(index) - 1
            self.rel_pos_h = replicated_weight(device, dtype, count, head)
            self.rel_pos_w = replicated_weight(device, dtype, count, head)

    def forward(self, x: Tensor) -> Tensor:
        """[B, rows, columns, size] -> the same."""
        count, rows, columns, _ = x.shape
        qkv = self.qkv.forward(x).view(count, rows * columns, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, heads, rows * columns, head size]
        bias = self._biases(q, rows, columns) if self.has_distances else None
        found = scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj.forward(found.transpose(1, 2).reshape(count, rows, columns, -1))

    def _biases(self, q: Tensor, rows: int, columns: int) -> Tensor:
        """What is added to scores for distances in rows and columns, [B, heads, L, L]."""
        squares = q.unflatten(2, (rows, columns))
        by_row = torch.einsum("bnhwc,hkc->bnhwk", squares, distances(self.rel_pos_h.tensor, rows))
        by_column = torch.einsum("bnhwc,wkc->bnhwk", squares, distances(self.rel_pos_w.tensor, columns))
        return (by_row.unsqueeze(-1) + by_column.unsqueeze(-2)).flatten(4).flatten(2, 3)


def distances(table: Tensor, length: int) -> Tensor:
    """Vectors for the distances between places on an axis, [length, length, head size], of a table that is
    interpolated to so many."""
    count = 2 * length - 1
    if len(table) != count:
        table = interpolate(table.T.unsqueeze(0), size=count, mode="linear")[0].T
    places = torch.arange(length, device=table.device)
    return table[places[:, None] - places + length - 1]


class SamLayer(Layer):
    """One block."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: SamTower, index: int) -> None:
        size, inner = tower.hidden_size, tower.intermediate_size
        self.window = 0 if index in tower.global_layers else tower.window
        self.activation = tower.activation
        self.layer_norm1 = LayerNorm(device, dtype, size, tower.eps)
        self.attn = SamAttention(device, dtype, tower, index)
        self.layer_norm2 = LayerNorm(device, dtype, size, tower.eps)
        self.lin1 = ReplicatedLinear(device, dtype, size, inner, bias=True)
        self.lin2 = ReplicatedLinear(device, dtype, inner, size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, rows, columns, size] -> the same."""
        x = x + self._attended(self.layer_norm1.forward(x))
        return x + self.lin2.forward(
            activate(self.activation, self.lin1.forward(self.layer_norm2.forward(x)))
        )

    def _attended(self, x: Tensor) -> Tensor:
        """Attention within windows, of which the last ones are filled up with zeros that are attended to."""
        if not self.window:
            return self.attn.forward(x)
        side, (count, rows, columns, _) = self.window, x.shape
        x = pad(x, (0, 0, 0, -columns % side, 0, -rows % side))
        high, wide = x.shape[1] // side, x.shape[2] // side
        windows = x.view(count, high, side, wide, side, -1).transpose(2, 3)
        found = self.attn.forward(windows.reshape(-1, side, side, x.shape[3]))
        whole = found.view(count, high, wide, side, side, -1).transpose(2, 3)
        return whole.reshape(x.shape)[:, :rows, :columns]


class Convolution(Layer):
    """A convolution without bias: [B, channels, rows, columns] -> the same with other channels."""

    def __init__(
        self, device: Device, dtype: torch.dtype, sizes: tuple[int, int], kernel: int, stride: int
    ) -> None:
        self.stride, self.padding = stride, kernel // 2
        self.weight = replicated_weight(device, dtype, sizes[1], sizes[0], kernel, kernel)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, rows, columns], with zeros around it."""
        return conv2d(x, self.weight.tensor, stride=self.stride, padding=self.padding)


class SamNeck(Layer):
    """Two convolutions with norms behind them: [B, rows, columns, size] -> [B, rows, columns, channels]."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: SamTower) -> None:
        size, neck = tower.hidden_size, tower.channels[0]
        self.conv1 = Convolution(device, dtype, (size, neck), 1, 1)
        self.layer_norm1 = LayerNorm(device, dtype, neck, NECK_EPS)
        self.conv2 = Convolution(device, dtype, (neck, neck), 3, 1)
        self.layer_norm2 = LayerNorm(device, dtype, neck, NECK_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        x = self.layer_norm1.forward(channels_last(self.conv1.forward(channels_first(x))))
        return self.layer_norm2.forward(channels_last(self.conv2.forward(channels_first(x))))


class SamDown(Layer):
    """Two convolutions that leave every other row and column each."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: SamTower) -> None:
        neck, middle, last = tower.channels
        self.conv1 = Convolution(device, dtype, (neck, middle), 3, 2)
        self.conv2 = Convolution(device, dtype, (middle, last), 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, rows, columns] -> [B, rows * columns / 16, last channels]."""
        return self.conv2.forward(self.conv1.forward(x)).flatten(2).transpose(1, 2)


class Sam(Layer):
    """The tower and its neck."""

    def __init__(self, device: Device, dtype: torch.dtype, tower: SamTower) -> None:
        size = tower.hidden_size
        self.patch_size, self.hidden_size = tower.patch_size, size
        self.patch_embed = SiglipProjection(device, dtype, size, tower.patch_size)
        self.pos_embed = (
            replicated_weight(device, dtype, 1, tower.side, tower.side, size) if tower.has_positions else None
        )
        self.layers = [SamLayer(device, dtype, tower, index) for index in range(tower.num_layers)]
        self.neck = SamNeck(device, dtype, tower)

    def slices(self, pixels: Tensor, taken: int = 0) -> Slices[tuple[Tensor, Tensor]]:
        """[B, 3, height, width] -> what the neck gives, [B, rows, columns, channels], and what layer `taken`
        does, [B, rows, columns, size]."""
        rows, columns = (side // self.patch_size for side in pixels.shape[2:])
        x = self.patch_embed.forward(cut_patches(pixels, self.patch_size)).unflatten(1, (rows, columns))
        if self.pos_embed is not None:
            x = x + resized(self.pos_embed.tensor, rows, columns)
        found = x
        works = self.works(rows, columns)
        for index, (layer, done) in enumerate(zip(self.layers, parts_done(works), strict=True)):
            x = layer.forward(x)
            if index == taken:
                found = x
            yield done
        return self.neck.forward(x), found

    def works(self, rows: int, columns: int) -> list[float]:
        """Work of each layer on a picture of so many rows and columns of patches."""
        count = rows * columns
        attended = [min(layer.window**2 or count, count) for layer in self.layers]
        return [layer_work(count, self.hidden_size, one) for one in attended]


def resized(table: Tensor, rows: int, columns: int) -> Tensor:
    """Learned positions [1, side, side, size], interpolated to so many rows and columns."""
    if table.shape[1:3] == (rows, columns):
        return table
    found = interpolate(
        channels_first(table).float(),
        size=(rows, columns),
        mode="bicubic",
        align_corners=False,
        antialias=True,
    )
    return channels_last(found).to(table.dtype)


def channels_first(x: Tensor) -> Tensor:
    """[B, rows, columns, size] -> [B, size, rows, columns]."""
    return x.permute(0, 3, 1, 2)


def channels_last(x: Tensor) -> Tensor:
    """[B, size, rows, columns] -> [B, rows, columns, size]."""
    return x.permute(0, 2, 3, 1)
