"""config.json of DeepSeek-OCR 2 as transformers writes it: its encoder of images. Torch-free."""

from typing import ClassVar

from msgspec import Struct

from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import check_activation, contradiction
from runtime.models.config.pixtral_config import HfAxialRope

QUERIES = {"query_768": 144, "query_1024": 256}  # learned queries, by the size of what they are asked of
DOWNSAMPLING = 4  # of rows and columns of patches, by two convolutions


class HfSam(Struct, frozen=True):
    """sam_config, with the defaults of transformers."""

    hidden_size: sizes.Width = 768
    output_channels: sizes.Width = 256
    num_hidden_layers: sizes.Layers = 12
    num_attention_heads: sizes.Heads = 12
    image_size: sizes.Width = 1024
    patch_size: sizes.Width = 16
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    mlp_ratio: float = 4.0
    use_abs_pos: bool = True
    use_rel_pos: bool = True
    window_size: sizes.Width = 14
    global_attn_indexes: tuple[int, ...] = (2, 5, 8, 11)
    mlp_dim: sizes.Width | None = None
    downsample_channels: tuple[sizes.Width, sizes.Width] = (512, 896)


class HfOcrDecoder(Struct, frozen=True):
    """encoder_config: the layers behind SAM's, with the defaults of transformers."""

    hidden_size: sizes.Width = 4096
    intermediate_size: sizes.Width = 22016
    num_hidden_layers: sizes.Layers = 32
    num_attention_heads: sizes.Heads = 32
    num_key_value_heads: sizes.Heads | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_parameters: HfAxialRope | None = None
    use_sliding_window: bool = False


class HfOcrVision(Struct, frozen=True):
    """vision_config of DeepSeek-OCR 2."""

    sam_config: HfSam = HfSam()
    encoder_config: HfOcrDecoder = HfOcrDecoder()


class HfDeepSeekOcr(Struct, frozen=True):
    """What DeepSeek-OCR 2's config.json says of images."""

    vision_config: HfOcrVision = HfOcrVision()
    image_token_id: int = 128815


class SamTower(Struct, frozen=True, kw_only=True):
    """SAM's vision transformer, and the convolutions behind it."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int  # height and width in pixels of what the tables of positions are for
    patch_size: int
    window: int  # rows and columns of patches that attend to each other in most layers
    global_layers: tuple[int, ...]  # in which all patches attend to each other
    channels: tuple[int, int, int]  # of the neck, and behind each of two convolutions
    eps: float
    activation: str  # one of ACTIVATIONS
    has_qkv_bias: bool
    has_positions: bool  # learned ones, between which is interpolated
    has_relative_positions: bool

    @property
    def side(self) -> int:
        """Rows and columns of patches that the tables of positions are for."""
        return self.image_size // self.patch_size

    def attended_side(self, index: int) -> int:
        """Rows and columns of patches that a layer's table of relative positions is for."""
        return self.side if index in self.global_layers else self.window

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, inner, (neck, *wider) = self.hidden_size, self.intermediate_size, self.channels
        layer = 4 * size * size + size + 3 * self.has_qkv_bias * size + 4 * size
        layer += 2 * size * inner + inner + size
        head = size // self.num_heads
        tables = [2 * head * (2 * self.attended_side(i) - 1) for i in range(self.num_layers)]
        found = 3 * self.patch_size**2 * size + size + self.has_positions * self.side**2 * size
        found += self.num_layers * layer + self.has_relative_positions * sum(tables)
        return found + neck * size + 9 * neck * neck + 4 * neck + 9 * (neck * wider[0] + wider[0] * wider[1])


class DeepSeekOcrEncoder(Struct, frozen=True, kw_only=True):
    """The encoder of DeepSeek-OCR 2: what SAM's tower makes of an image stands before learned queries in a
    decoder's layers, and what these give is projected."""

    placeholder_id: int  # the token of a prompt that stands for an image
    sam: SamTower
    hidden_size: int  # of the layers behind SAM's
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    activation: str  # one of ACTIVATIONS
    eps: float
    theta: float  # base of the rotary positions
    output_size: int  # hidden size of the text model
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each
    kinds: ClassVar[frozenset[MediaKind]] = frozenset({MediaKind.IMAGE})  # what it takes

    def num_rows(self, image_size: int) -> int:
        """Rows that an image of this height and width in pixels is encoded to."""
        return (image_size // self.sam.patch_size // DOWNSAMPLING) ** 2

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, heads = self.hidden_size, self.num_heads + 2 * self.num_kv_heads
        channels = heads * (size // self.num_heads)
        layer = channels * (size + 1) + size * size + 3 * size * self.intermediate_size + 2 * size
        queries = sum(QUERIES.values()) * size
        projector = self.output_size * (size + 1) + self.output_size
        return self.sam.num_weights + self.num_layers * layer + size + queries + projector


def read_deepseek_ocr(raw: bytes, hidden_size: int) -> DeepSeekOcrEncoder:
    """DeepSeek-OCR 2. Raises ModelError."""
    hf = decode(raw, HfDeepSeekOcr, "config.json")
    vision, decoder = hf.vision_config.sam_config, hf.vision_config.encoder_config
    check_activation("sam_config.hidden_act", vision.hidden_act)
    check_activation("encoder_config.hidden_act", decoder.hidden_act)
    kv_heads = decoder.num_key_value_heads or decoder.num_attention_heads
    if (
        vision.hidden_size % vision.num_attention_heads
        or decoder.hidden_size % (2 * decoder.num_attention_heads)
        or decoder.num_attention_heads % kv_heads
    ):
        raise contradiction("vision_config has heads that do not divide hidden sizes, or one another")
    if vision.downsample_channels[1] != decoder.hidden_size:
        raise contradiction(
            f"sam_config.downsample_channels ends with {vision.downsample_channels[1]}, and encoder_config "
            f"has a hidden_size of {decoder.hidden_size}"
        )
    if decoder.use_sliding_window:
        raise contradiction("encoder_config has use_sliding_window")
    rope = decoder.rope_parameters
    if rope is None:
        rope = HfAxialRope() if decoder.rope_theta is None else HfAxialRope(decoder.rope_theta)
    return DeepSeekOcrEncoder(
        placeholder_id=hf.image_token_id,
        sam=sam_tower(vision, vision.downsample_channels),
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_layers=decoder.num_hidden_layers,
        num_heads=decoder.num_attention_heads,
        num_kv_heads=kv_heads,
        activation=decoder.hidden_act,
        eps=decoder.rms_norm_eps,
        theta=rope.rope_theta,
        output_size=hidden_size,
    )


def sam_tower(vision: HfSam, channels: tuple[int, int]) -> SamTower:
    """SAM's tower as a configuration says, with so many channels behind its convolutions."""
    return SamTower(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.mlp_dim or int(vision.hidden_size * vision.mlp_ratio),
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        window=vision.window_size,
        global_layers=vision.global_attn_indexes,
        channels=(vision.output_channels, *channels),
        eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
        has_qkv_bias=vision.qkv_bias,
        has_positions=vision.use_abs_pos,
        has_relative_positions=vision.use_rel_pos,
    )
