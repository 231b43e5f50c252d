"""The encoder of Qwen3-VL (Bai et al., 2025): the tower of Qwen2-VL with learned positions besides the rotary
ones. Rows have what is added behind the text model's first layers, too: outputs of layers in the middle of
the tower, merged as its last one is (DeepStack; Meng et al., 2024)."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu

from runtime.devices.base import Device
from runtime.layers.norm import LayerNorm
from runtime.layers.parallel.replicated import ReplicatedEmbedding, ReplicatedLinear
from runtime.layers.upload import upload, upload_int64
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.qwen3_vl_config import Qwen3VlEncoder
from runtime.models.config.renames import Renames
from runtime.models.vision.learned_positions import linear_taps, table_entries
from runtime.models.vision.qwen_vl import Block, PatchEmbedding, patch_angles, patch_places
from runtime.models.vision.slices import Slices


class Merger(Layer):
    """From neighbouring patches to one embedding of the text model. `norms_merged`: the norm is of what is
    merged, not of each patch."""

    def __init__(
        self, device: Device, dtype: torch.dtype, config: Qwen3VlEncoder, *, norms_merged: bool
    ) -> None:
        self.merged_size = config.hidden_size * config.merge_size**2
        self.normed_size = self.merged_size if norms_merged else config.hidden_size
        self.norm = LayerNorm(device, dtype, self.normed_size, config.eps)
        self.fc1 = ReplicatedLinear(device, dtype, self.merged_size, self.merged_size, bias=True)
        self.fc2 = ReplicatedLinear(device, dtype, self.merged_size, config.text_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, size] -> [B, L / merge_size^2, text model's size]."""
        normed = self.norm.forward(x.reshape(len(x), -1, self.normed_size))
        return self.fc2.forward(gelu(self.fc1.forward(normed.reshape(len(x), -1, self.merged_size))))


class Qwen3Vl(Layer):
    """See MediaEncoder."""

    renames: Renames = (("visual.", "media_encoder."), (".linear_fc1.", ".fc1."), (".linear_fc2.", ".fc2."))

    def __init__(self, device: Device, dtype: torch.dtype, config: Qwen3VlEncoder) -> None:
        self.torch_device, self.dtype, self.config = device.torch_device, dtype, config
        self.output_size = config.output_size
        self.patch_embed = PatchEmbedding(device, dtype, config)
        self.pos_embed = ReplicatedEmbedding(device, dtype, config.table_side**2, config.hidden_size)
        self.blocks = [Block(device, dtype, config) for _ in range(config.num_layers)]
        self.merger = Merger(device, dtype, config, norms_merged=False)
        self.deepstack_merger_list = [
            Merger(device, dtype, config, norms_merged=True) for _ in config.deepstack_layers
        ]

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """As QwenVl.slices, -> of each its rows, [L / merge_size^2, hidden * (1 + deepstack layers)]."""
        config, (count, rows, columns) = self.config, media[0].grid
        patches = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = self.patch_embed.forward(patches.view(-1, *media[0].shape[1:]).to(self.dtype))
        x = x.view(len(media) * count, rows * columns, -1)
        places = patch_places(rows, columns, config.merge_size)
        x = x + self._positions(places, rows, columns)
        cos, sin = patch_angles(
            upload_int64(places.ravel(), self.torch_device).view(-1, 2), config.head_dim // 2
        )
        whole = [torch.arange(len(places), device=self.torch_device).unsqueeze(0)]
        features = dict[int, Tensor]()
        for index, block in enumerate(self.blocks):
            x = block.forward(x, whole, cos, sin)
            if index in config.deepstack_layers:
                merger = self.deepstack_merger_list[config.deepstack_layers.index(index)]
                features[index] = merger.forward(x)
            yield (index + 1) / len(self.blocks)
        rows_of_all = torch.cat((self.merger.forward(x), *features.values()), dim=-1)
        return list(rows_of_all.reshape(len(media), -1, config.output_size))

    def _positions(self, places: np.ndarray, rows: int, columns: int) -> Tensor:
        """Learned positions of patches in these places, [L, size]."""
        side = self.config.table_side
        entries, weights = table_entries(
            linear_taps(places[:, 0], rows, side), linear_taps(places[:, 1], columns, side), side
        )
        found = embedding(
            upload_int64(entries.ravel(), self.torch_device).view(entries.shape), self.pos_embed.weight.tensor
        )
        weighed = found * upload(weights, self.torch_device).view(*entries.shape, 1)
        return weighed.sum(dim=1).to(self.dtype)
