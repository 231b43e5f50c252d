"""The encoder of LLaVA-OneVision (Li et al., 2024): a SigLIP vision tower over an image as a whole and over
its tiles, and a projector of two linear layers.

Patches of tiles form one picture, whose padding is left out, and which is made smaller where it is large;
behind each of its rows is a learned vector. Frames of a video have half the rows and columns.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from runtime.devices.base import Device
from runtime.layers.parallel.replicated import replicated_weight
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.onevision_config import OneVisionEncoder, TileGrid
from runtime.models.config.renames import Renames
from runtime.models.vision.gemma_vision import SiglipVisionTower
from runtime.models.vision.llava import Projector
from runtime.models.vision.slices import Slices


class OneVision(Layer):
    """See MediaEncoder."""

    renames: Renames = (
        ("vision_tower.vision_model.", "vision_tower."),
        ("vision_tower.encoder.layers.", "vision_tower.layers."),
        ("vision_tower.", "media_encoder.vision_tower."),
        ("multi_modal_projector.", "media_encoder.multi_modal_projector."),
        ("image_newline", "media_encoder.image_newline"),
    )

    def __init__(self, device: Device, dtype: torch.dtype, config: OneVisionEncoder) -> None:
        self.torch_device, self.dtype, self.config = device.torch_device, dtype, config
        self.output_size = config.output_size
        self.vision_tower = SiglipVisionTower(device, dtype, config.tower, has_last_norm=False)
        self.multi_modal_projector = Projector(device, dtype, config)
        self.image_newline = replicated_weight(device, dtype, config.output_size)

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """Tiles or frames, float32 [N, 3, image_size, image_size] of each -> of each its rows, [rows,
        hidden]. The grids have N, and the height and width of the image in pixels: 0 of a video."""
        pixels = upload(np.concatenate([one.values for one in media]), self.torch_device)
        x = yield from self.vision_tower.slices(pixels.view(-1, *media[0].shape[1:]).to(self.dtype))
        count, height, width = media[0].grid
        of_each = self.multi_modal_projector.forward(x).unflatten(0, (len(media), count))
        if not height:
            return [self._frames(one) for one in of_each]
        if count == 1:  # one of several images
            return [torch.cat((one[0], self.image_newline.tensor.unsqueeze(0))) for one in of_each]
        tiles = self.config.tiles_of(height, width)
        return [torch.cat((one[0], self._picture(one[1:], tiles))) for one in of_each]

    def _frames(self, x: Tensor) -> Tensor:
        """Patches of a video's frames, [frames, patches, hidden] -> rows of all."""
        side, small = self.config.side, -(-self.config.side // 2)
        frames = x.transpose(1, 2).unflatten(2, (side, side))
        pooled = interpolate(frames, size=(small, small), mode="bilinear").flatten(2).transpose(1, 2)
        return torch.cat((pooled.flatten(0, 1), self.image_newline.tensor.unsqueeze(0)))

    def _picture(self, x: Tensor, tiles: TileGrid) -> Tensor:
        """Patches of an image's tiles, [tiles, patches, hidden] -> rows of all."""
        side, size = self.config.side, self.config.output_size
        whole = x.view(tiles.rows, tiles.columns, side, side, size).permute(4, 0, 2, 1, 3)
        whole = whole.reshape(size, tiles.rows * side, tiles.columns * side)
        top, left = tiles.skipped_rows, tiles.skipped_columns
        used = whole[:, top : whole.shape[1] - top, left : whole.shape[2] - left]
        if tiles.is_shrunk:
            kept = tiles.kept_rows, tiles.kept_columns
            used = interpolate(used.unsqueeze(0), size=kept, mode="bilinear")[0]
        ends = self.image_newline.tensor.view(size, 1, 1).expand(size, used.shape[1], 1)
        return torch.cat((used, ends), dim=2).flatten(1).T
