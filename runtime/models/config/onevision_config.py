"""config.json of LLaVA-OneVision: its encoder of images and videos. Torch-free."""

from math import ceil, sqrt
from re import fullmatch
from typing import ClassVar

from msgspec import Struct

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import check_activation
from runtime.models.config.gemma_vision_config import HfSiglip

EDGES = (384, 768, 1152, 1536, 1920, 2304)
PINPOINTS = tuple((height, width) for height in EDGES for width in EDGES)
MAX_PIXELS = 1 << 24  # of an image's tiles together
ENOUGH = 1.1  # times that rows and columns may be more than the bound before they are made fewer


class HfOneVision(Struct, frozen=True):
    """What LLaVA-OneVision's config.json says of images, with the defaults of transformers."""

    vision_config: HfSiglip = HfSiglip(1152, 4304, 26, 16, 384, 14)
    image_token_index: int | None = None
    image_token_id: int | None = None
    video_token_index: int | None = None
    video_token_id: int | None = None
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True
    vision_feature_layer: int | list[int] = -1
    vision_feature_select_strategy: str = "full"
    image_grid_pinpoints: tuple[tuple[int, int], ...] | None = None
    vision_aspect_ratio: str = "anyres_max_9"


class TileGrid(Struct, frozen=True):
    """The tiles of an image, and which of their patches become rows of the encoding."""

    rows: int  # of tiles
    columns: int
    skipped_rows: int  # of patches, at the top and at the bottom: padding
    skipped_columns: int  # at the left and at the right
    kept_rows: int  # that the others are interpolated to
    kept_columns: int
    is_shrunk: bool  # these are fewer


class OneVisionEncoder(Struct, frozen=True, kw_only=True):
    """LLaVA-OneVision's encoder: patches of a SigLIP tower of an image as a whole and of its tiles, or of the
    frames of a video, projected to the size of the text model."""

    placeholder_id: int  # the token of a prompt that stands for an image
    video_placeholder_id: int  # for a video
    tower: ClipTower
    output_size: int  # hidden size of the text model
    activation: str  # of the projector, one of ACTIVATIONS
    has_bias: bool  # of the projector
    pinpoints: tuple[tuple[int, int], ...]  # heights and widths that an image may be resized and padded to
    max_tiles: int  # whose patches become rows, at most
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE, MediaKind.VIDEO})  # what it takes

    @property
    def side(self) -> int:
        """Rows and columns of patches in a tile."""
        return self.tower.image_size // self.tower.patch_size

    @property
    def frame_rows(self) -> int:
        """Rows that a frame of a video is encoded to."""
        return ceil(self.side / 2) ** 2

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        tower, output = self.tower, self.output_size
        embeddings = (3 * tower.patch_size**2 + 1 + tower.num_patches) * tower.hidden_size
        projector = output * (tower.hidden_size + output) + 2 * self.has_bias * output
        return embeddings + tower.num_layers * tower.layer_weights + projector + output

    def best_size(self, height: int, width: int) -> tuple[int, int]:
        """The size that an image is resized and padded to: that in which most of its pixels are kept, and of
        those the one with the least padding."""

        def worth(size: tuple[int, int]) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - size[0] * size[1]

        return max(self.pinpoints, key=worth)

    def tiles_of(self, height: int, width: int) -> TileGrid:
        """The tiles of an image of this size."""
        size, edge = self.best_size(height, width), self.tower.image_size
        rows, columns = size[0] // edge, size[1] // edge
        high, wide = rows * self.side, columns * self.side
        top = left = 0
        if width / height > wide / high:
            top = (high - int(round(height * (wide / width), 7))) // 2
        else:
            left = (wide - int(round(width * (high / height), 7))) // 2
        high, wide = high - 2 * top, wide - 2 * left
        ratio = sqrt(high * wide / (self.max_tiles * self.side**2))
        kept = (int(high // ratio), int(wide // ratio)) if ratio > ENOUGH else (high, wide)
        return TileGrid(rows, columns, top, left, *kept, ratio > ENOUGH)


def read_onevision(raw: bytes, hidden_size: int) -> OneVisionEncoder | None:
    """LLaVA-OneVision; None: the vision tower is another than SigLIP's. Raises ModelError."""
    hf = decode(raw, HfOneVision, "config.json")
    vision, layer = hf.vision_config, hf.vision_feature_layer
    if vision.model_type != "siglip_vision_model":
        return None
    check_activation("vision_config.hidden_act", vision.hidden_act)
    check_activation("projector_hidden_act", hf.projector_hidden_act)
    count = vision.num_hidden_layers
    num_layers = -1 if isinstance(layer, list) else layer if layer >= 0 else count + 1 + layer
    bound = fullmatch(r"anyres_max_([1-9][0-9]?)", hf.vision_aspect_ratio)
    if bound is None or not 0 <= num_layers <= count or hf.vision_feature_select_strategy != "full":
        raise ModelError(
            f"config.json: vision_aspect_ratio {hf.vision_aspect_ratio}, vision_feature_layer {layer} and "
            f"vision_feature_select_strategy {hf.vision_feature_select_strategy} must be anyres_max_ and a "
            f"number below 100, one of {count} layers, and full; set --enable-multimodal false to serve text "
            "alone"
        )
    placeholders = (
        next((id for id in ids if id is not None), default)
        for ids, default in (
            ((hf.image_token_index, hf.image_token_id), 151646),
            ((hf.video_token_index, hf.video_token_id), 151647),
        )
    )
    tower = ClipTower(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=num_layers,
        num_heads=vision.num_attention_heads,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
    )
    pinpoints = PINPOINTS if hf.image_grid_pinpoints is None else hf.image_grid_pinpoints
    _check_sizes(tower, pinpoints)
    image_id, video_id = placeholders
    return OneVisionEncoder(
        placeholder_id=image_id,
        video_placeholder_id=video_id,
        tower=tower,
        output_size=hidden_size,
        activation=hf.projector_hidden_act,
        has_bias=hf.multimodal_projector_bias,
        pinpoints=pinpoints,
        max_tiles=int(bound[1]),
    )


def _check_sizes(tower: ClipTower, pinpoints: tuple[tuple[int, int], ...]) -> None:
    if tower.hidden_size % tower.num_heads or tower.image_size < tower.patch_size:
        raise ModelError(
            f"config.json: vision_config.hidden_size {tower.hidden_size} is not a multiple of "
            f"num_attention_heads {tower.num_heads}, or image_size {tower.image_size} is smaller than a "
            "patch; restore the file from the model's source"
        )
    edge = tower.image_size
    wrong = [
        [height, width]
        for height, width in pinpoints
        if min(height, width) < edge or height % edge or width % edge or height * width > MAX_PIXELS
    ]
    if wrong or not pinpoints:
        raise ModelError(
            f"config.json: image_grid_pinpoints {wrong} must be heights and widths in multiples of {edge} "
            f"pixels, with {MAX_PIXELS} pixels at most; restore the file from the model's source"
        )
