"""What stands for an encoder that is on another server (--language-only)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.layers.upload import upload
from runtime.layers.weight import Layer
from runtime.messages.media import MediaValues
from runtime.models.config.renames import Renames
from runtime.models.vision.slices import Slices


class RowsOfOthers(Layer):
    """Takes rows that another server has encoded. See MediaEncoder."""

    renames: Renames = ()

    def __init__(self, device: Device, dtype: torch.dtype, width: int) -> None:
        self.torch_device, self.dtype, self.output_size = device.torch_device, dtype, width

    def slices(self, media: Sequence[MediaValues]) -> Slices[list[Tensor]]:
        """The values of each file, as rows [num_rows, width], in one piece."""
        yield 1.0
        return [
            upload(one.values, self.torch_device).view(one.num_rows, self.output_size).to(self.dtype)
            for one in media
        ]
