"""config.json of models with Pixtral's vision tower: Pixtral itself (LLaVA's layout) and Mistral Small 3.1
(Mistral3). Torch-free."""

from typing import ClassVar

from msgspec import Struct

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import check_activation, num_computed_layers


class HfAxialRope(Struct, frozen=True):
    """rope_parameters of the tower."""

    rope_theta: float = 10000.0


class HfPixtral(Struct, frozen=True):
    """vision_config of Pixtral's tower, with the defaults of transformers."""

    hidden_size: sizes.Width = 1024
    intermediate_size: sizes.Width = 4096
    num_hidden_layers: sizes.Layers = 24
    num_attention_heads: sizes.Heads = 16
    patch_size: sizes.Width = 16
    hidden_act: str = "gelu"
    rope_theta: float | None = None  # of older files
    rope_parameters: HfAxialRope | None = None
    model_type: str = "pixtral"


class HfTextNorm(Struct, frozen=True):
    """What the tower's projector takes of text_config, with the defaults of transformers."""

    rms_norm_eps: float = 1e-6


# of files without parts: those of Mistral Small 3.1
MISTRAL3_TOWER = HfPixtral(patch_size=14)
MISTRAL3_TEXT = HfTextNorm(rms_norm_eps=1e-5)


class HfMistral3(Struct, frozen=True):
    """What Mistral3's config.json says of images, with the defaults of transformers."""

    vision_config: HfPixtral = MISTRAL3_TOWER
    text_config: HfTextNorm = MISTRAL3_TEXT
    image_token_index: int | None = None
    image_token_id: int | None = None
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = False
    vision_feature_layer: int | list[int] = -1
    spatial_merge_size: sizes.Width = 2


class HfPixtralLlava(Struct, frozen=True):
    """What the config.json of a LLaVA with Pixtral's tower says of images, with the defaults of
    transformers."""

    vision_config: HfPixtral
    image_token_index: int | None = None
    image_token_id: int | None = None
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True
    vision_feature_layer: int | list[int] = -2
    vision_feature_select_strategy: str = "default"


class PixtralEncoder(Struct, frozen=True, kw_only=True):
    """Pixtral's tower over images of any size, and a projector; with `merge_size` above 1 it joins
    neighbouring patches, as that of Mistral Small 3.1."""

    placeholder_id: int  # the token of a prompt that stands for an image
    hidden_size: int
    intermediate_size: int
    num_layers: int  # that are computed
    num_heads: int
    patch_size: int  # height and width in pixels
    theta: float  # base of the rotary positions
    activation: str  # of the tower, one of ACTIVATIONS
    projector_activation: str
    has_bias: bool  # of the projector
    merge_size: int  # rows and columns of patches that become one row of the encoding
    merger_eps: float | None  # of the norm before patches are merged; None: nothing is merged
    output_size: int  # hidden size of the text model
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE})  # what it takes

    @property
    def unit(self) -> int:
        """Height and width in pixels of what becomes one row of the encoding."""
        return self.patch_size * self.merge_size

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, out = self.hidden_size, self.output_size
        layer = 4 * size * size + 3 * size * self.intermediate_size + 2 * size
        merger = 0 if self.merger_eps is None else size + size * size * self.merge_size**2
        projector = out * (size + out) + 2 * self.has_bias * out
        return 3 * self.patch_size**2 * size + size + self.num_layers * layer + merger + projector


def read_mistral3(raw: bytes, hidden_size: int) -> PixtralEncoder | None:
    """Mistral Small 3.1 and models of its layout; None: the vision tower is another than Pixtral's. Raises
    ModelError."""
    hf = decode(raw, HfMistral3, "config.json")
    if hf.vision_config.model_type != "pixtral":
        return None
    return _encoder(hf, hidden_size, merge_size=hf.spatial_merge_size, merger_eps=hf.text_config.rms_norm_eps)


def read_pixtral_llava(raw: bytes, hidden_size: int) -> PixtralEncoder:
    """Pixtral 12B and models of its layout. Raises ModelError."""
    hf = decode(raw, HfPixtralLlava, "config.json")
    if hf.vision_feature_select_strategy != "full":
        raise ModelError(
            f"config.json: vision_feature_select_strategy {hf.vision_feature_select_strategy} leaves out the "
            "first patch of Pixtral's tower, which has no class embedding; it must be full"
        )
    return _encoder(hf, hidden_size, merge_size=1, merger_eps=None)


def _encoder(
    hf: HfMistral3 | HfPixtralLlava, hidden_size: int, *, merge_size: int, merger_eps: float | None
) -> PixtralEncoder:
    vision = hf.vision_config
    check_activation("vision_config.hidden_act", vision.hidden_act)
    check_activation("projector_hidden_act", hf.projector_hidden_act)
    if vision.hidden_size % (4 * vision.num_attention_heads):
        raise ModelError(
            f"config.json: vision_config has {vision.num_attention_heads} heads for a size of "
            f"{vision.hidden_size}; that of a head must be a multiple of 4; restore the file from the "
            "model's source"
        )
    placeholder_id = hf.image_token_index if hf.image_token_id is None else hf.image_token_id
    rope = vision.rope_parameters
    if rope is None:
        rope = HfAxialRope() if vision.rope_theta is None else HfAxialRope(vision.rope_theta)
    return PixtralEncoder(
        placeholder_id=10 if placeholder_id is None else placeholder_id,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=num_computed_layers(hf.vision_feature_layer, vision.num_hidden_layers),
        num_heads=vision.num_attention_heads,
        patch_size=vision.patch_size,
        theta=rope.rope_theta,
        activation=vision.hidden_act,
        projector_activation=hf.projector_hidden_act,
        has_bias=hf.multimodal_projector_bias,
        merge_size=merge_size,
        merger_eps=merger_eps,
        output_size=hidden_size,
    )
