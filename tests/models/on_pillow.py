"""Image processors of transformers that are written for torchvision, which is not installed here, with
Pillow's resizing: everything else of them is transformers' own code."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.image_utils import SizeDict

NAMES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def pad(images: Tensor, padding: Sequence[int], fill: Any = 0) -> Tensor:
    """As torchvision's, with zeros: left, top, right, bottom."""
    assert not np.any(fill), "only zeros are used"
    left, top, right, bottom = padding
    return torch.nn.functional.pad(images, (left, right, top, bottom))


class OnPillow:
    """What processors take of torchvision."""

    def resize(self, image: Tensor, size: SizeDict, resample: int | None = None, **_: Any) -> Tensor:
        """uint8 [..., 3, height, width], resized by Pillow."""
        found = [
            np.asarray(
                Image.fromarray(one.permute(1, 2, 0).numpy()).resize((size.width, size.height), resample)
            )
            for one in image.reshape(-1, *image.shape[-3:])
        ]
        resized = torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).contiguous()
        return resized.view(*image.shape[:-2], size.height, size.width)

    def pad(self, images: Tensor, pad_size: SizeDict) -> Tensor:
        """[..., height, width] with zeros at the right and at the bottom."""
        height, width = images.shape[-2:]
        return pad(images, (0, 0, pad_size.width - width, pad_size.height - height))

    def normalize(self, image: Tensor, mean: Any, std: Any, **_: Any) -> Tensor:
        """As torchvision's, in the image's own dtype."""
        parts = (torch.as_tensor(part, dtype=image.dtype).view(-1, 1, 1) for part in (mean, std))
        return image.sub(next(parts)).div_(next(parts))


def on_pillow(module: str, name: str, *, replaces_own: bool = True) -> Any:
    """A processor of this class of transformers, without settings. `replaces_own`: also methods of its own,
    and not only those of its base."""
    stubs = {one: ModuleType(one) for one in NAMES}
    for one, stub in stubs.items():
        stub.__spec__ = ModuleSpec(one, None)
    stubs[NAMES[-1]].pad = pad  # type: ignore[attr-defined]
    stubs[NAMES[-2]].functional = stubs[NAMES[-1]]  # type: ignore[attr-defined]
    with patch.dict(sys.modules, stubs):
        processor = getattr(import_module(f"transformers.models.{module}"), name)
    if replaces_own:
        return object.__new__(type(name, (OnPillow, processor), {}))
    base = type("Base", (OnPillow, *processor.__bases__), {})
    return object.__new__(type(name, (processor, base), {}))


def prepared(processor: Any, images: Sequence[np.ndarray], **settings: Any) -> Any:
    """What a processor makes of images, uint8 [height, width, 3]."""
    tensors = [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in images]
    return processor._preprocess(
        tensors,
        do_resize=True,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        disable_grouping=True,
        return_tensors=None,
        **settings,
    )
