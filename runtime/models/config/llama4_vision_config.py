"""config.json of Llama 4: its encoder of images. Torch-free."""

from typing import ClassVar

from msgspec import Struct

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import contradiction, merge_of
from runtime.models.config.pixtral_config import HfAxialRope


class HfLlama4Vision(Struct, frozen=True):
    """vision_config of Llama 4, with the defaults of transformers."""

    hidden_size: sizes.Width = 768
    intermediate_size: sizes.Width = 5632
    num_hidden_layers: sizes.Layers = 34
    num_attention_heads: sizes.Heads = 16
    image_size: sizes.Width = 448
    patch_size: sizes.Width = 14
    pixel_shuffle_ratio: float = 0.5
    projector_input_dim: sizes.Width = 4096
    projector_output_dim: sizes.Width = 4096
    vision_output_dim: sizes.Width = 7680
    rope_theta: float | None = None  # of older files
    rope_parameters: HfAxialRope | None = None


class HfLlama4(Struct, frozen=True):
    """What Llama 4's config.json says of images, with the defaults of transformers."""

    vision_config: HfLlama4Vision | None = None
    image_token_index: int | None = None
    image_token_id: int | None = None


class Llama4Encoder(Struct, frozen=True, kw_only=True):
    """The encoder of Llama 4: a vision transformer over square tiles of an image and the whole of it, whose
    patches have learned and rotary positions, and two layers behind squares of patches."""

    row_id: int  # the token that stands for a row
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int  # height and width of a tile in pixels
    patch_size: int  # the same of a patch
    theta: float  # base of the rotary positions
    merge_size: int  # rows and columns of patches that become one row of the encoding
    adapter_size: int  # of what is between the two layers behind squares
    adapter_output: int  # and behind them
    output_size: int  # hidden size of the text model
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE})  # what it takes

    @property
    def side(self) -> int:
        """Rows and columns of patches of a tile."""
        return self.image_size // self.patch_size

    @property
    def num_rows(self) -> int:
        """Rows that a tile is encoded to."""
        return (self.side // self.merge_size) ** 2

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, inner = self.hidden_size, self.intermediate_size
        layer = 4 * size * (size + 1) + 2 * size * inner + inner + size + 4 * size
        table = (3 * self.patch_size**2 + 1 + self.side**2 + 1 + 4) * size
        adapter = self.adapter_size * size * self.merge_size**2 + self.adapter_size * self.adapter_output
        return table + self.num_layers * layer + adapter + self.adapter_output * self.output_size


def read_llama4(raw: bytes, hidden_size: int) -> Llama4Encoder | None:
    """Llama 4; None: there is no vision tower. Raises ModelError."""
    hf = decode(raw, HfLlama4, "config.json")
    vision = hf.vision_config
    if vision is None:
        return None
    merge = merge_of(
        "pixel_shuffle_ratio", vision.pixel_shuffle_ratio, vision.image_size // vision.patch_size
    )
    _check(vision, merge)
    row_id = hf.image_token_index if hf.image_token_id is None else hf.image_token_id
    rope = vision.rope_parameters
    if rope is None:
        rope = HfAxialRope() if vision.rope_theta is None else HfAxialRope(vision.rope_theta)
    return Llama4Encoder(
        row_id=200092 if row_id is None else row_id,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        theta=rope.rope_theta,
        merge_size=merge,
        adapter_size=vision.projector_input_dim,
        adapter_output=vision.projector_output_dim,
        output_size=hidden_size,
    )


def _check(vision: HfLlama4Vision, merge: int) -> None:
    """Raises ModelError for sizes that do not fit together."""
    size = vision.hidden_size
    if size % (4 * vision.num_attention_heads):
        raise ModelError(
            f"config.json: vision_config has {vision.num_attention_heads} heads for a size of {size}; that "
            "of a head must be a multiple of 4; restore the file from the model's source"
        )
    pairs = (
        ("intermediate_size", vision.intermediate_size, size * merge**2),
        ("projector_input_dim", vision.projector_input_dim, vision.projector_output_dim),
        ("vision_output_dim", vision.vision_output_dim, vision.projector_output_dim),
    )
    for name, found, wanted in pairs:
        if found != wanted:
            raise contradiction(f"vision_config.{name} {found} is not {wanted}")
