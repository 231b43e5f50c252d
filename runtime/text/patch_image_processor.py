"""Images and videos of any size as patches for the encoders of Qwen2-VL and its successors, with the
arithmetic of transformers' image processor on Pillow."""

from collections.abc import Callable
from hashlib import sha256

import numpy as np
from PIL import Image

from runtime.errors import InvalidRequest
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.patch_image_config import MAX_STRETCH, PatchImageConfig
from runtime.models.config.qwen_vl_config import QwenVlEncoder
from runtime.text.image_processor import normalized
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.pictures import picture_of, pixels_of
from runtime.text.video_tokens import TokenLayout, moment_times, moments_apart, one_grid


class PatchImageProcessor:
    """Prepares images and videos for QwenVlEncoder; see MediaProcessor. Their tokens stand in grids."""

    sounds = None
    is_attended = False

    def __init__(
        self,
        encoder: QwenVlEncoder,
        images: PatchImageConfig,
        videos: PatchImageConfig,
        encode: Callable[[str], list[int]],
    ) -> None:
        """`encode`: makes tokens of the times in a video."""
        self.placeholder_ids = {
            MediaKind.IMAGE: encoder.placeholder_id,
            MediaKind.VIDEO: encoder.video_placeholder_id,
        }
        self._configs = {MediaKind.IMAGE: images, MediaKind.VIDEO: videos}
        self._kinds = encoder.kinds
        self._tokens_per_s = encoder.tokens_per_s
        self._marks, self._encode = encoder.moments, encode

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [patches, 3, patch_size, patch_size] of an image, and
        [patches, 3, temporal_patch_size, patch_size, patch_size] of a video, with the patches of one row of
        the encoding side by side."""
        check_kind(media, self._kinds)
        config, frames = self._configs[media.kind], media.values
        check_shape(media, config)
        size = config.resized(frames.shape[1], frames.shape[2], len(frames))
        is_video = media.kind is MediaKind.VIDEO
        patches = video_patches(frames, size, config) if is_video else image_patches(frames[0], size, config)
        count = -(-len(frames) // config.temporal_patch_size) if is_video else 1
        rows, columns = (side // config.patch_size for side in size)
        layout = self._layout(media, (count, rows // config.merge_size, columns // config.merge_size))
        step = self._frame_step(media) if is_video else 1.0
        marks = self._marks if is_video else None
        return Prepared(
            kind=media.kind,
            digest=sha256(b"%b %b %f" % (media.digest, config.digest_text, step)).digest(),
            values=patches,
            token_ids=layout.token_ids,
            positions=layout.positions,
            grid=(count, rows, columns),
            token_grids=layout.token_grids,
            frame_step=step,
            replaced=(marks.start_id, marks.end_id) if marks is not None and marks.replaces_own else (),
        )

    def _layout(self, media: Media, grid: tuple[int, int, int]) -> TokenLayout:
        """Tokens of a file whose rows are in this grid of frames, rows and columns."""
        if media.kind is not MediaKind.VIDEO or self._marks is None:
            return one_grid(self.placeholder_ids[media.kind], grid)
        depth = self._configs[MediaKind.VIDEO].temporal_patch_size
        times = moment_times(media.frame_times_s, depth, self._marks)
        return moments_apart(grid, times, self._marks, self._encode)

    def _frame_step(self, media: Media) -> float:
        """Positions from the tokens of one moment of a video to those of the next, by the time between them
        where the model knows time."""
        times = media.frame_times_s
        if not self._tokens_per_s or len(times) < 2:
            return 1.0
        gap_s = (times[-1] - times[0]) / (len(times) - 1)
        return self._tokens_per_s * self._configs[MediaKind.VIDEO].temporal_patch_size * gap_s


def check_shape(media: Media, config: PatchImageConfig) -> None:
    """Raises InvalidRequest for images and videos of a shape that the model does not take."""
    height, width = media.values.shape[1:3]
    unit = config.patch_size * config.merge_size
    if not config.do_resize and (height % unit or width % unit):
        raise InvalidRequest(
            f"{media.param}: the model takes images as they are, and their width and height must be "
            f"multiples of {unit} pixels, not {width} x {height}; resize it",
            param=media.param,
        )
    if max(height, width) > MAX_STRETCH * min(height, width):
        raise InvalidRequest(
            f"{media.param}: an image of {width} x {height} pixels is too narrow; crop it", param=media.param
        )


def image_patches(image: np.ndarray, size: tuple[int, int], config: PatchImageConfig) -> np.ndarray:
    """uint8 [height, width, 3], resized to `size` -> float32 [patches, 3, patch_size, patch_size]."""
    height, width = size
    if image.shape[:2] != size:
        image = pixels_of(picture_of(image).resize((width, height), Image.Resampling(config.resample)))
    return square_patches(normalized(image.transpose(2, 0, 1), config), config.patch_size, config.merge_size)


def square_patches(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """float32 [3, height, width] -> patches [patches, 3, patch, patch], those of a square of `merge` rows and
    columns side by side."""
    rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
    squares = pixels.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
    return np.ascontiguousarray(squares.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, patch, patch))


def video_patches(frames: np.ndarray, size: tuple[int, int], config: PatchImageConfig) -> np.ndarray:
    """uint8 [frames, height, width, 3], resized to `size` -> float32 [patches, 3, temporal_patch_size,
    patch_size, patch_size], one moment after the other. The last frame is repeated up to a whole patch."""
    depth, patch = config.temporal_patch_size, config.patch_size
    count = -(-len(frames) // depth)
    each = size[0] // patch * (size[1] // patch)
    patches = np.empty((count, each, 3, depth, patch, patch), np.float32)
    for index in range(count * depth):
        frame = frames[min(index, len(frames) - 1)]
        patches[index // depth, :, :, index % depth] = image_patches(frame, size, config)
    return patches.reshape(-1, *patches.shape[2:])
