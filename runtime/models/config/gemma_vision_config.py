"""config.json of Gemma 3: its encoder of images. Torch-free."""

from math import isqrt
from typing import ClassVar

from msgspec import Struct

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import check_activation


class HfSiglip(Struct, frozen=True):
    """vision_config of a SigLIP vision tower, with the defaults of transformers."""

    hidden_size: sizes.Width = 768
    intermediate_size: sizes.Width = 3072
    num_hidden_layers: sizes.Layers = 12
    num_attention_heads: sizes.Heads = 12
    image_size: sizes.Width = 224
    patch_size: sizes.Width = 16
    layer_norm_eps: float = 1e-6
    hidden_act: str = "gelu_pytorch_tanh"
    model_type: str = "siglip_vision_model"


class HfGemma3(Struct, frozen=True):
    """What Gemma 3's config.json says of images, with the defaults of transformers."""

    vision_config: HfSiglip | None = None
    mm_tokens_per_image: sizes.Width = 256
    boi_token_index: int = 255_999
    eoi_token_index: int = 256_000
    image_token_index: int | None = None
    image_token_id: int | None = None


class Gemma3Encoder(Struct, frozen=True, kw_only=True):
    """Gemma 3's encoder of images: patches of a SigLIP tower, of which squares are averaged and projected to
    the size of the text model. The tokens of an image attend to all of them."""

    placeholder_id: int  # the token of a prompt that stands for an image, and before its tokens
    row_id: int  # the token that stands for a row
    end_id: int  # the token behind those of an image
    tower: ClipTower
    pooled_side: int  # rows and columns of patches that become one row of the encoding
    output_size: int  # hidden size of the text model
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE})  # what it takes

    @property
    def num_rows(self) -> int:
        """Rows that an image is encoded to."""
        return (self.tower.image_size // self.tower.patch_size // self.pooled_side) ** 2

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        tower, size = self.tower, self.tower.hidden_size
        embeddings = (3 * tower.patch_size**2 + 1 + tower.num_patches) * size
        return embeddings + tower.num_layers * tower.layer_weights + 2 * size + size * (1 + self.output_size)


def read_gemma3(raw: bytes, hidden_size: int) -> Gemma3Encoder | None:
    """Gemma 3; None: there is no vision tower, or another than SigLIP's. Raises ModelError."""
    hf = decode(raw, HfGemma3, "config.json")
    vision = hf.vision_config
    if vision is None or vision.model_type != "siglip_vision_model":
        return None
    check_activation("vision_config.hidden_act", vision.hidden_act)
    if vision.hidden_size % vision.num_attention_heads:
        raise ModelError(
            f"config.json: vision_config.hidden_size {vision.hidden_size} is not a multiple of "
            f"num_attention_heads {vision.num_attention_heads}; restore the file from the model's source"
        )
    row_id = hf.image_token_id if hf.image_token_index is None else hf.image_token_index
    encoder = Gemma3Encoder(
        placeholder_id=hf.boi_token_index,
        row_id=262_144 if row_id is None else row_id,
        end_id=hf.eoi_token_index,
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
        pooled_side=vision.image_size // vision.patch_size // isqrt(hf.mm_tokens_per_image) or 1,
        output_size=hidden_size,
    )
    if encoder.num_rows != hf.mm_tokens_per_image:
        raise ModelError(
            f"config.json: an image of {vision.image_size} pixels and patches of {vision.patch_size} make "
            f"{encoder.num_rows} rows, and mm_tokens_per_image is {hf.mm_tokens_per_image}; restore the file "
            "from the model's source"
        )
    return encoder
