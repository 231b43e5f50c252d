"""config.json of models with a tower for texts and one for images, whose vectors can be compared: CLIP,
SigLIP, and SigLIP 2 over images of any shape (NaFlex). Torch-free."""

from math import ceil, isqrt
from pathlib import Path
from typing import Annotated as A
from typing import ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_config import Encoder, HfEncoder, read_encoder
from runtime.models.config.encoder_parts import check_activation
from runtime.models.config.image_config import ImageConfig, Normalization, check_images, read_image_fields
from runtime.models.config.pooling import Pooling
from runtime.models.config.tasks import PoolingOptions

NAFLEX = "Siglip2Model"  # other models of SigLIP 2 have the classes of SigLIP
DUALS = ("CLIPModel", "SiglipModel", NAFLEX)
HALF = (0.5, 0.5, 0.5)
SCALE_EPS = 1e-5  # to which the scale of an image is searched
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
    num_patches: A[int, Meta(ge=1, le=1 << 16)] = 256  # NaFlex: learned positions, those of a square


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
    is_naflex: bool = False  # images keep their shape, and positions are interpolated
    num_rows: ClassVar[int] = 1  # that an image is encoded to
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE})  # what it takes

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
    is_siglip, is_naflex = architecture != "CLIPModel", architecture == NAFLEX
    text = _part("text_config", hf.text_config, SIGLIP_TEXT if is_siglip else HfDualText())
    vision = _part("vision_config", hf.vision_config, SIGLIP_VISION if is_siglip else HfDualVision())
    output = (text.projection_size or text.hidden_size) if is_siglip else hf.projection_dim
    _check(text, vision, output, is_siglip=is_siglip)
    side = _side(vision.num_patches) if is_naflex else vision.image_size // vision.patch_size
    dual = DualText(
        images=DualImages(
            placeholder_id=0,
            tower=ClipTower(
                hidden_size=vision.hidden_size,
                intermediate_size=vision.intermediate_size,
                num_layers=vision.num_hidden_layers,
                num_heads=vision.num_attention_heads,
                image_size=side * vision.patch_size if is_naflex else vision.image_size,
                patch_size=vision.patch_size,
                eps=vision.layer_norm_eps,
                activation=vision.hidden_act,
            ),
            output_size=output,
            is_siglip=is_siglip,
            is_naflex=is_naflex,
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


class NaflexConfig(Normalization, frozen=True, kw_only=True):
    """How images are prepared for NaFlex: resized to about as many patches as there may be, in their own
    shape."""

    image_mean: tuple[float, float, float] = HALF
    image_std: tuple[float, float, float] = HALF
    do_resize: bool = True
    resample: A[int, Meta(ge=0, le=5)] = 2  # Pillow's number of the filter; 2: bilinear
    patch_size: A[int, Meta(ge=1, le=1024)] = 16
    max_num_patches: A[int, Meta(ge=1, le=1 << 14)] = 256

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of an image: a search by halves, as transformers has it."""
        least, most = SCALE_EPS / 10, 100.0
        while most - least >= SCALE_EPS:
            scale = (least + most) / 2
            rows, columns = self._scaled(scale, height), self._scaled(scale, width)
            if rows * columns <= self.max_num_patches:
                least = scale
            else:
                most = scale
        return self._scaled(least, height), self._scaled(least, width)

    def _scaled(self, scale: float, size: int) -> int:
        return max(ceil(size * scale / self.patch_size), 1)


def read_naflex(folder: Path, images: DualImages) -> NaflexConfig:
    """How the images of the model in this folder are prepared. Raises ModelError."""
    config, name = read_image_fields(folder, NaflexConfig)
    if config.patch_size != images.tower.patch_size or not config.do_resize or min(config.image_std) <= 0:
        raise ModelError(
            f"{name} resizes no images, has an image_std of 0, or another patch_size than config.json "
            f"({images.tower.patch_size}); restore both from the model's source"
        )
    return config


def _side(num_patches: int) -> int:
    """Rows of the square of learned positions. Raises ModelError where they form none."""
    if isqrt(num_patches) ** 2 != num_patches:
        raise ModelError(
            f"config.json: vision_config.num_patches {num_patches} is no square; restore the file from the "
            "model's source"
        )
    return isqrt(num_patches)


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
