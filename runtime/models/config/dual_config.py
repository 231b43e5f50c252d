"""config.json of models with a tower for texts and one for images, whose vectors can be compared: CLIP and
SigLIP. Torch-free."""

from pathlib import Path
from typing import ClassVar, TypeVar

import msgspec
from msgspec import Struct, structs

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_config import Encoder, HfEncoder, read_encoder
from runtime.models.config.encoder_parts import check_activation, num_kept_rows
from runtime.models.config.image_config import ImageConfig, check_images, read_image_fields
from runtime.models.config.pooling import Pooling
from runtime.models.config.tasks import PoolingOptions

DUALS = ("CLIPModel", "SiglipModel")
HALF = (0.5, 0.5, 0.5)
T = TypeVar("T", bound=Struct)


class HfDualText(Struct, frozen=True, kw_only=True):
    """text_config, with CLIP's defaults of transformers."""

    vocab_size: sizes.Tokens = 49408
    hidden_size: sizes.Width = 512
    intermediate_size: sizes.Width = 2048
    num_hidden_layers: sizes.Layers = 12
    num_attention_heads: sizes.Heads = 8
    max_position_embeddings: sizes.Tokens = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    projection_size: sizes.Width | None = None


class HfDualVision(Struct, frozen=True, kw_only=True):
    """vision_config, with CLIP's defaults of transformers."""

    hidden_size: sizes.Width = 768
    intermediate_size: sizes.Width = 3072
    num_hidden_layers: sizes.Layers = 12
    num_attention_heads: sizes.Heads = 12
    image_size: sizes.Width = 224
    patch_size: sizes.Width = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    vision_use_head: bool = True


SIGLIP_TEXT = HfDualText(
    vocab_size=32000,
    hidden_size=768,
    intermediate_size=3072,
    num_attention_heads=12,
    max_position_embeddings=64,
    hidden_act="gelu_pytorch_tanh",
    layer_norm_eps=1e-6,
)
SIGLIP_VISION = HfDualVision(patch_size=16, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6)


class HfDual(Struct, frozen=True):
    """config.json as far as both families have it."""

    text_config: dict[str, object] = {}
    vision_config: dict[str, object] = {}
    projection_dim: sizes.Width = 512
    dtype: str | None = None
    torch_dtype: str | None = None


class DualImages(Struct, frozen=True, kw_only=True):
    """The tower for images, which makes one vector of each: CLIP's, or with `is_siglip` SigLIP's."""

    placeholder_id: int  # the only token of a sequence that is an image
    tower: ClipTower
    output_size: int  # of the vectors of both towers
    is_siglip: bool
    num_rows: ClassVar[int] = 1  # that an image is encoded to
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE})  # what it takes

    @property
    def num_kept(self) -> int:
        """Rows that the ranks keep of images that were encoded (scheduling/encodings.py)."""
        return num_kept_rows(self.output_size)

    @property
    def num_weights(self) -> int:
        """Numbers in all weights, with those of the projection of texts."""
        tower, size = self.tower, self.tower.hidden_size
        layers = tower.num_layers * tower.layer_weights
        patches = (tower.num_patches + 3 * tower.patch_size**2) * size
        if not self.is_siglip:  # a class, a position of it, two norms; two projections
            return layers + patches + 6 * size + 2 * self.output_size * size
        # a bias and a norm; a layer with a probe in place of a norm, and its bias; a projection of texts
        return layers + patches + 3 * size + tower.layer_weights - size + self.output_size * (size + 1)


class DualText(Struct, frozen=True, kw_only=True):
    """What the tower for texts has besides its sizes."""

    images: DualImages
    activation: str  # one of ACTIVATIONS in encoder_parts.py
    is_causal: bool  # tokens see those before them alone
    has_bias: bool  # of the projection
    padded: int  # tokens that a text is filled up to; 0: none are added


def read_any_encoder(architecture: str, raw: bytes) -> tuple[HfEncoder, Encoder, DualText | None]:
    """An encoder of texts, and what it has beside a tower for images; None: there is none. Raises
    ModelError."""
    if architecture not in DUALS:
        return *read_encoder(architecture, raw), None
    hf = decode(raw, HfDual, "config.json")
    is_siglip = architecture == "SiglipModel"
    text = _part("text_config", hf.text_config, SIGLIP_TEXT if is_siglip else HfDualText())
    vision = _part("vision_config", hf.vision_config, SIGLIP_VISION if is_siglip else HfDualVision())
    output = (text.projection_size or text.hidden_size) if is_siglip else hf.projection_dim
    _check(text, vision, output, is_siglip=is_siglip)
    dual = DualText(
        images=DualImages(
            placeholder_id=0,
            tower=ClipTower(
                hidden_size=vision.hidden_size,
                intermediate_size=vision.intermediate_size,
                num_layers=vision.num_hidden_layers,
                num_heads=vision.num_attention_heads,
                image_size=vision.image_size,
                patch_size=vision.patch_size,
                eps=vision.layer_norm_eps,
                activation=vision.hidden_act,
            ),
            output_size=output,
            is_siglip=is_siglip,
        ),
        activation=text.hidden_act,
        is_causal=not is_siglip,
        has_bias=is_siglip,
        padded=text.max_position_embeddings if is_siglip else 0,
    )
    own = structs.asdict(text)
    fields = {name: own[name] for name in HfEncoder.__struct_fields__ if name in own}
    encoder = Encoder(
        num_positions=text.max_position_embeddings,
        first_position=0,
        num_types=0,
        activation=text.hidden_act,
        head_activation="tanh",
    )
    return HfEncoder(**fields, dtype=hf.dtype or hf.torch_dtype), encoder, dual


def dual_pooling(dual: DualText | None, options: PoolingOptions) -> Pooling | None:
    """How texts and images become vectors; None: the model has one tower. Raises ModelError."""
    if dual is None:
        return None
    if options.mode not in ("auto", "last"):
        raise ModelError(f"--pooling {options.mode}: texts of this model are their last token; leave it out")
    return Pooling(task="embed", mode="last", size=dual.images.output_size, is_whole=True, is_normalised=True)


class SiglipImageConfig(ImageConfig, frozen=True, kw_only=True):
    """How images are prepared for SigLIP where no file says otherwise."""

    do_center_crop: bool = False
    image_mean: tuple[float, float, float] = HALF
    image_std: tuple[float, float, float] = HALF


def read_dual_images(folder: Path, images: DualImages) -> ImageConfig:
    """How the images of the model in this folder are prepared. Raises ModelError."""
    kind = SiglipImageConfig if images.is_siglip else ImageConfig
    config, name = read_image_fields(folder, kind)
    check_images(config, name)
    return config


def _part(name: str, given: dict[str, object], defaults: T) -> T:
    """A part of config.json, with `defaults` for what it lacks. Raises ModelError."""
    fields = structs.asdict(defaults) | {key: value for key, value in given.items() if value is not None}
    return decode(msgspec.json.encode(fields), type(defaults), f"config.json: {name}")


def _check(text: HfDualText, vision: HfDualVision, output: int, *, is_siglip: bool) -> None:
    check_activation("text_config.hidden_act", text.hidden_act)
    check_activation("vision_config.hidden_act", vision.hidden_act)
    for name, part in (("text_config", text), ("vision_config", vision)):
        if part.hidden_size % part.num_attention_heads:
            raise ModelError(
                f"config.json: {name}.hidden_size {part.hidden_size} is not a multiple of "
                f"num_attention_heads {part.num_attention_heads}; restore the file from the model's source"
            )
    if is_siglip and (not vision.vision_use_head or vision.hidden_size != output):
        raise ModelError(
            f"config.json: the vectors of vision_config have {vision.hidden_size} numbers, or no head, and "
            f"those of text_config {output}; restore the file from the model's source"
        )
