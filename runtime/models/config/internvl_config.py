"""config.json of InternVL 3, as transformers writes it and as its authors do (InternVLChatModel): its encoder
of images. Torch-free."""

from typing import ClassVar

from msgspec import Struct, structs

from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import check_activation, contradiction, merge_of, num_computed_layers

MAX_SIDE = 1 << 14  # pixels
NO_PLACEHOLDER = -1  # in place of an id that the tokenizer knows


class HfInternVision(Struct, frozen=True):
    """vision_config of InternVL, with the defaults of transformers."""

    hidden_size: sizes.Width = 1024
    num_hidden_layers: sizes.Layers = 24
    num_attention_heads: sizes.Heads = 16
    attention_bias: bool = False
    use_qk_norm: bool = False
    intermediate_size: sizes.Width = 4096
    hidden_act: str = "gelu"
    norm_type: str = "layer_norm"
    layer_norm_eps: float = 1e-6
    image_size: sizes.Width | list[int] = 448
    patch_size: sizes.Width | list[int] = 14
    use_absolute_position_embeddings: bool = True
    use_mean_pooling: bool = True


class HfInternVl(Struct, frozen=True):
    """What InternVL's config.json says of images, with the defaults of transformers."""

    vision_config: HfInternVision = HfInternVision()
    image_token_id: int = 151667
    downsample_ratio: float = 0.5
    projector_hidden_act: str = "gelu"
    vision_feature_layer: int | list[int] = -1
    vision_feature_select_strategy: str = "default"


class HfChatVision(Struct, frozen=True):
    """vision_config of InternVLChatModel, with the defaults of its authors' code."""

    hidden_size: sizes.Width = 3200
    num_hidden_layers: sizes.Layers = 48
    num_attention_heads: sizes.Heads = 25
    qkv_bias: bool = False
    qk_normalization: bool = True
    intermediate_size: sizes.Width = 12800
    hidden_act: str = "gelu"
    norm_type: str = "rms_norm"
    layer_norm_eps: float = 1e-6
    image_size: sizes.Width = 224
    patch_size: sizes.Width = 14


class HfChat(Struct, frozen=True):
    """What the config.json of InternVLChatModel says of images, with the defaults of its authors' code."""

    vision_config: HfChatVision = HfChatVision()
    downsample_ratio: float = 0.5
    select_layer: int = -1
    ps_version: str = "v1"
    force_image_size: sizes.Width | None = None
    min_dynamic_patch: sizes.Width = 1
    max_dynamic_patch: sizes.Width = 6
    dynamic_image_size: bool = False
    use_thumbnail: bool = False


class AuthorsTiles(Struct, frozen=True):
    """How InternVLChatModel cuts images, which its config.json says."""

    least: int  # fewest and most tiles of an image
    most: int
    has_whole: bool  # the whole image follows several tiles


class InternVlEncoder(Struct, frozen=True, kw_only=True):
    """The encoder of InternVL: a vision transformer over square tiles of an image, and a projector of
    neighbouring patches."""

    placeholder_id: int  # the token of a prompt that stands for an image
    hidden_size: int
    intermediate_size: int
    num_layers: int  # that are computed
    num_heads: int
    image_size: int  # height and width of a tile in pixels
    patch_size: int  # the same of a patch
    merge_size: int  # rows and columns of patches that become one row of the encoding
    eps: float
    activation: str  # of the tower, one of ACTIVATIONS
    projector_activation: str
    has_bias: bool  # of queries, keys and values
    has_head_norms: bool  # queries and keys are normed
    has_rms_norms: bool  # in place of layer norms
    has_last_norm: bool
    output_size: int  # hidden size of the text model
    # of a checkpoint in its authors' layout, whose tokenizer knows the placeholder; None: in that of
    # transformers
    authors: AuthorsTiles | None = None
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE, MediaKind.VIDEO})  # what it takes

    @property
    def num_patches(self) -> int:
        """Patches of a tile."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_rows(self) -> int:
        """Rows that a tile is encoded to."""
        return self.num_patches // self.merge_size**2

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, out, merged = self.hidden_size, self.output_size, self.hidden_size * self.merge_size**2
        norm = size if self.has_rms_norms else 2 * size
        attention = 4 * size * size + size + 3 * self.has_bias * size + 2 * self.has_head_norms * size
        mlp = 2 * size * self.intermediate_size + self.intermediate_size + size
        layer = attention + mlp + 2 * norm + 2 * size  # with the scales of what is added
        table = (self.num_patches + 2 + 3 * self.patch_size**2 + 1) * size
        projector = 2 * merged + out * (merged + 1) + out * (out + 1)
        return table + self.num_layers * layer + 2 * self.has_last_norm * size + projector


def read_internvl(raw: bytes, hidden_size: int) -> InternVlEncoder:
    """InternVL 3 and models of its layout. Raises ModelError."""
    return _encoder(decode(raw, HfInternVl, "config.json"), hidden_size)


def _encoder(hf: HfInternVl, hidden_size: int) -> InternVlEncoder:
    vision = hf.vision_config
    check_activation("vision_config.hidden_act", vision.hidden_act)
    check_activation("projector_hidden_act", hf.projector_hidden_act)
    if vision.norm_type not in ("layer_norm", "rms_norm"):
        raise contradiction(f"vision_config.norm_type {vision.norm_type} is neither layer_norm nor rms_norm")
    if not vision.use_absolute_position_embeddings:
        raise contradiction("vision_config has no use_absolute_position_embeddings")
    if hf.vision_feature_select_strategy != "default":
        raise contradiction("vision_feature_select_strategy is not default")
    if vision.hidden_size % vision.num_attention_heads:
        raise contradiction(
            f"vision_config.hidden_size {vision.hidden_size} is not a multiple of num_attention_heads "
            f"{vision.num_attention_heads}"
        )
    image, patch = (_square(name, getattr(vision, name)) for name in ("image_size", "patch_size"))
    merge = merge_of("downsample_ratio", hf.downsample_ratio, image // patch)
    num_layers = num_computed_layers(hf.vision_feature_layer, vision.num_hidden_layers)
    return InternVlEncoder(
        placeholder_id=hf.image_token_id,
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=num_layers,
        num_heads=vision.num_attention_heads,
        image_size=image,
        patch_size=patch,
        merge_size=merge,
        eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
        projector_activation=hf.projector_hidden_act,
        has_bias=vision.attention_bias,
        has_head_norms=vision.use_qk_norm,
        has_rms_norms=vision.norm_type == "rms_norm",
        has_last_norm=hf.vision_feature_layer == -1 and not vision.use_mean_pooling,
        output_size=hidden_size,
    )


def read_internvl_chat(raw: bytes, hidden_size: int) -> InternVlEncoder:
    """InternVL in the layout of its authors. Raises ModelError."""
    hf = decode(raw, HfChat, "config.json")
    vision = hf.vision_config
    if hf.ps_version != "v2":
        raise contradiction(f"ps_version {hf.ps_version} is not v2")
    inner = HfInternVision(
        hidden_size=vision.hidden_size,
        num_hidden_layers=vision.num_hidden_layers,
        num_attention_heads=vision.num_attention_heads,
        attention_bias=vision.qkv_bias,
        use_qk_norm=vision.qk_normalization,
        intermediate_size=vision.intermediate_size,
        hidden_act=vision.hidden_act,
        norm_type=vision.norm_type,
        layer_norm_eps=vision.layer_norm_eps,
        image_size=hf.force_image_size or vision.image_size,
        patch_size=vision.patch_size,
    )
    same = HfInternVl(
        vision_config=inner,
        image_token_id=NO_PLACEHOLDER,
        downsample_ratio=hf.downsample_ratio,
        vision_feature_layer=hf.select_layer,
    )
    tiles = AuthorsTiles(
        hf.min_dynamic_patch if hf.dynamic_image_size else 1,
        hf.max_dynamic_patch if hf.dynamic_image_size else 1,
        hf.use_thumbnail,
    )
    return structs.replace(_encoder(same, hidden_size), authors=tiles)


def _square(name: str, size: int | list[int]) -> int:
    """The side of a square. Raises ModelError."""
    sides = [size] * 2 if isinstance(size, int) else size
    if len(sides) != 2 or sides[0] != sides[1] or not 0 < sides[0] <= MAX_SIDE:
        raise contradiction(f"vision_config.{name} {sides} is no square of up to {MAX_SIDE} pixels")
    return sides[0]
