"""config.json of Kimi-VL and Kimi K2.5: their encoder of images. Torch-free.

Kimi-VL and Kimi K2.5 name the same numbers differently, and transformers has names of its own.
"""

from typing import ClassVar

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonDict
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import check_activation, contradiction
from runtime.models.config.pixtral_config import HfAxialRope

# names of vision_config in the files of Kimi-VL and Kimi K2.5 -> those of transformers
NAMES = {
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
}


class HfMoonVit(Struct, frozen=True):
    """vision_config, with the defaults of transformers."""

    hidden_size: sizes.Width = 1152
    intermediate_size: sizes.Width = 4304
    num_hidden_layers: sizes.Layers = 27
    num_attention_heads: sizes.Heads = 16
    patch_size: sizes.Width = 14
    pos_emb_height: sizes.Width = 64
    pos_emb_width: sizes.Width = 64
    hidden_act: str = "gelu_pytorch_tanh"
    merge_kernel_size: tuple[sizes.Width, sizes.Width] = (2, 2)
    rope_parameters: HfAxialRope = HfAxialRope()
    projector_ln_eps: float | None = None  # of Kimi K2.5's own files


class HfKimi(Struct, frozen=True):
    """What config.json says of images."""

    vision_config: JsonDict = {}
    media_placeholder_token_id: int | None = None
    image_token_id: int | None = None
    projection_layer_norm_eps: float | None = None


class KimiEncoder(Struct, frozen=True, kw_only=True):
    """MoonViT: a vision transformer over images of any size, with learned positions between which is
    interpolated and rotary ones by row and column, and a projector of neighbouring patches."""

    placeholder_id: int  # the token of a prompt that stands for an image
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # height and width in pixels
    table_side: int  # rows and columns of the table of learned positions
    merge_size: int  # rows and columns of patches that become one row of the encoding
    theta: float  # base of the rotary positions
    activation: str  # of the tower, one of ACTIVATIONS
    projector_eps: float  # of the norm before the projector
    output_size: int  # hidden size of the text model
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE})  # what it takes

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, inner = self.hidden_size, self.intermediate_size
        layer = 4 * size * (size + 1) + 2 * size * inner + inner + size + 4 * size
        table = (3 * self.patch_size**2 + 1 + self.table_side**2 + 2) * size
        merged = size * self.merge_size**2
        projector = 2 * size + merged * (merged + 1) + self.output_size * (merged + 1)
        return table + self.num_layers * layer + projector


def read_kimi(raw: bytes, hidden_size: int) -> KimiEncoder:
    """Kimi-VL or Kimi K2.5. Raises ModelError."""
    hf = decode(raw, HfKimi, "config.json")
    found: Fields = {NAMES.get(name, name): value for name, value in hf.vision_config.items()}
    # Kimi K2.5's own files have null where a part has no value
    known = {name: value for name, value in found.items() if value is not None}
    vision = decode(msgspec.json.encode(known), HfMoonVit, "config.json: vision_config")
    check_activation("vision_config.hidden_act", vision.hidden_act)
    if vision.hidden_size % (4 * vision.num_attention_heads):
        raise ModelError(
            f"config.json: vision_config has {vision.num_attention_heads} heads for a size of "
            f"{vision.hidden_size}; that of a head must be a multiple of 4; restore the file from the "
            "model's source"
        )
    if vision.pos_emb_height != vision.pos_emb_width:
        raise contradiction(
            f"vision_config has {vision.pos_emb_height} x {vision.pos_emb_width} learned positions, which "
            "are no square"
        )
    if vision.merge_kernel_size[0] != vision.merge_kernel_size[1]:
        raise contradiction(f"vision_config.merge_kernel_size {list(vision.merge_kernel_size)} is no square")
    placeholder_id = hf.media_placeholder_token_id if hf.image_token_id is None else hf.image_token_id
    eps = [one for one in (vision.projector_ln_eps, hf.projection_layer_norm_eps) if one is not None]
    return KimiEncoder(
        placeholder_id=163605 if placeholder_id is None else placeholder_id,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        patch_size=vision.patch_size,
        table_side=vision.pos_emb_height,
        merge_size=vision.merge_kernel_size[0],
        theta=vision.rope_parameters.rope_theta,
        activation=vision.hidden_act,
        projector_eps=next(iter(eps), 1e-5),
        output_size=hidden_size,
    )
