"""config.json of Qwen2-VL and Qwen2.5-VL: their encoder of images and videos. Torch-free."""

from typing import ClassVar, TypeVar

from msgspec import Struct

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import MomentMarks, check_activation


class HfVision2(Struct, frozen=True):
    """vision_config of Qwen2-VL, with the defaults of transformers."""

    depth: sizes.Layers = 32
    embed_dim: sizes.Width = 1280
    hidden_size: sizes.Width = 3584  # of the text model
    hidden_act: str = "quick_gelu"
    mlp_ratio: sizes.Width = 4
    num_heads: sizes.Heads = 16
    patch_size: sizes.Width = 14
    spatial_merge_size: sizes.Width = 2
    temporal_patch_size: sizes.Width = 2


class HfVision25(Struct, frozen=True):
    """vision_config of Qwen2.5-VL, with the defaults of transformers."""

    depth: sizes.Layers = 32
    hidden_size: sizes.Width = 3584
    out_hidden_size: sizes.Width = 3584
    hidden_act: str = "silu"
    intermediate_size: sizes.Width = 3420
    num_heads: sizes.Heads = 16
    patch_size: sizes.Width = 14
    spatial_merge_size: sizes.Width = 2
    temporal_patch_size: sizes.Width = 2
    window_size: sizes.Width = 112
    tokens_per_second: float = 4
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)


class HfQwen2Vl(Struct, frozen=True):
    """What Qwen2-VL's config.json says of images, with the defaults of transformers."""

    vision_config: HfVision2 = HfVision2()
    image_token_id: int = 151655
    video_token_id: int = 151656


class HfQwen25Vl(Struct, frozen=True):
    """What Qwen2.5-VL's config.json says of images, with the defaults of transformers."""

    vision_config: HfVision25 = HfVision25()
    image_token_id: int = 151655
    video_token_id: int = 151656


class QwenVlEncoder(Struct, frozen=True, kw_only=True, tag=True):
    """The encoder of Qwen2-VL, or with `is_gated` that of Qwen2.5-VL."""

    placeholder_id: int  # the token of a prompt that stands for an image
    video_placeholder_id: int  # for a video
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # height and width in pixels
    num_frames: int  # frames of a patch
    merge_size: int  # rows and columns of patches that become one row of the encoding
    activation: str  # one of ACTIVATIONS
    output_size: int  # hidden size of the text model
    is_gated: bool
    window_patches: int = 0  # rows and columns of a window; 0: all layers attend to whole images
    tokens_per_s: float = 0.0  # positions that a second of a video takes; 0: each moment takes one
    full_layers: tuple[int, ...] = ()  # where there are windows: the layers that attend to whole images
    eps: float = 1e-6  # of the tower's norms
    has_qkv_bias: bool = True
    has_joined_qkv: bool = True  # checkpoints have queries, keys and values in one weight
    has_bias: bool = True  # of the other linear layers of the tower, where it is gated
    has_patch_bias: bool = False  # the projection of patches has a bias
    spanning: frozenset[MediaKind] = frozenset()  # kinds whose bounds of pixels are of all frames together
    video_bounds: tuple[int, int] = (128 * 28 * 28, 768 * 28 * 28)  # of pixels, where no file has them
    moments: MomentMarks | None = None  # None: nothing is between the moments of a video
    has_token_grids: ClassVar[bool] = True  # its tokens have positions of frame, row and column
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE, MediaKind.VIDEO})  # what it takes

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_heads

    def is_full(self, index: int) -> bool:
        """Whether a layer attends to whole images."""
        return not self.window_patches or index in self.full_layers

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, inner = self.hidden_size, self.intermediate_size
        norm = size if self.is_gated else 2 * size
        mlp = 3 * size * inner + 2 * inner + size if self.is_gated else 2 * size * inner + inner + size
        layer = 4 * size * (size + 1) + mlp + 2 * norm
        merged = size * self.merge_size**2
        merger = norm + merged * (merged + 1) + self.output_size * (merged + 1)
        return 3 * size * self.num_frames * self.patch_size**2 + self.num_layers * layer + merger


E = TypeVar("E", bound=QwenVlEncoder)


def read_qwen2_vl(raw: bytes, hidden_size: int) -> QwenVlEncoder:
    """Qwen2-VL. Raises ModelError."""
    hf = decode(raw, HfQwen2Vl, "config.json")
    vision = hf.vision_config
    check_output("hidden_size", vision.hidden_size, hidden_size)
    return checked(
        QwenVlEncoder(
            placeholder_id=hf.image_token_id,
            video_placeholder_id=hf.video_token_id,
            hidden_size=vision.embed_dim,
            intermediate_size=vision.embed_dim * vision.mlp_ratio,
            num_layers=vision.depth,
            num_heads=vision.num_heads,
            patch_size=vision.patch_size,
            num_frames=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            activation=vision.hidden_act,
            output_size=hidden_size,
            is_gated=False,
        )
    )


def read_qwen25_vl(raw: bytes, hidden_size: int) -> QwenVlEncoder:
    """Qwen2.5-VL. Raises ModelError."""
    hf = decode(raw, HfQwen25Vl, "config.json")
    ids = hf.image_token_id, hf.video_token_id
    return qwen25_encoder(hf.vision_config, ids, hidden_size, hf.vision_config.tokens_per_second)


def qwen25_encoder(
    vision: HfVision25,
    ids: tuple[int, int],
    hidden_size: int,
    tokens_per_s: float,
    *,
    has_joined_qkv: bool = True,
) -> QwenVlEncoder:
    """The encoder of Qwen2.5-VL and Qwen2.5-Omni. `ids`: of the tokens that stand for images and videos.
    Raises ModelError."""
    side = vision.window_size // vision.spatial_merge_size // vision.patch_size
    if not side:
        raise ModelError(
            f"config.json: vision_config.window_size {vision.window_size} is smaller than "
            f"{vision.spatial_merge_size} patches of {vision.patch_size} pixels; restore the file from the "
            "model's source"
        )
    check_output("out_hidden_size", vision.out_hidden_size, hidden_size)
    return checked(
        QwenVlEncoder(
            placeholder_id=ids[0],
            video_placeholder_id=ids[1],
            hidden_size=vision.hidden_size,
            intermediate_size=vision.intermediate_size,
            num_layers=vision.depth,
            num_heads=vision.num_heads,
            patch_size=vision.patch_size,
            num_frames=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            activation=vision.hidden_act,
            output_size=hidden_size,
            is_gated=True,
            window_patches=side * vision.spatial_merge_size,
            tokens_per_s=tokens_per_s,
            full_layers=vision.fullatt_block_indexes,
            has_joined_qkv=has_joined_qkv,
        )
    )


def check_output(name: str, size: int, hidden_size: int, part: str = "vision_config") -> None:
    """Raises ModelError for rows of another size than that of the text model."""
    if size != hidden_size:
        raise ModelError(
            f"config.json: {part}.{name} {size} is not the text model's hidden_size {hidden_size}; "
            "restore the file from the model's source"
        )


def checked(encoder: E) -> E:
    """The encoder. Raises ModelError for an activation or heads that are not supported."""
    check_activation("vision_config.hidden_act", encoder.activation)
    if encoder.hidden_size % (4 * encoder.num_heads):
        raise ModelError(
            f"config.json: vision_config has {encoder.num_heads} heads for a size of {encoder.hidden_size}; "
            "that of a head must be a multiple of 4; restore the file from the model's source"
        )
    return encoder
