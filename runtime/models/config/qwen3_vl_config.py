"""config.json of Qwen3-VL and Qwen3.5, dense and with experts: their encoder of images and videos.
Torch-free."""

from math import isqrt

from msgspec import Struct, structs

from runtime.errors import ModelError
from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import MomentMarks
from runtime.models.config.qwen_vl_config import QwenVlEncoder, check_output, checked


class HfVision3(Struct, frozen=True):
    """vision_config of Qwen3-VL, with the defaults of transformers."""

    depth: sizes.Layers = 27
    hidden_size: sizes.Width = 1152
    out_hidden_size: sizes.Width = 3584
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: sizes.Width = 4304
    num_heads: sizes.Heads = 16
    patch_size: sizes.Width = 16
    spatial_merge_size: sizes.Width = 2
    temporal_patch_size: sizes.Width = 2
    num_position_embeddings: sizes.Width = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)


class HfQwen3Vl(Struct, frozen=True):
    """What Qwen3-VL's config.json says of images, with the defaults of transformers."""

    vision_config: HfVision3 = HfVision3()
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653


class HfQwen35(HfQwen3Vl, frozen=True):
    """What Qwen3.5's config.json says of images, with the defaults of transformers."""

    image_token_id: int = 248056
    video_token_id: int = 248057
    vision_start_token_id: int = 248053
    vision_end_token_id: int = 248054


class Qwen3VlEncoder(QwenVlEncoder, frozen=True, kw_only=True):
    """The encoder of Qwen3-VL and Qwen3.5. A row has the embedding, then what is added behind the text
    model's first layers; `output_size` counts all of it."""

    text_size: int  # hidden size of the text model
    deepstack_layers: tuple[int, ...]  # whose outputs the text model is given
    table_side: int  # rows and columns of the table of learned positions

    @property
    def num_deepstack(self) -> int:
        """Layers of the text model behind which a row has something to add."""
        return len(self.deepstack_layers)

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        size, inner = self.hidden_size, self.intermediate_size
        layer = 4 * size * (size + 1) + 2 * size * inner + inner + size + 4 * size
        merged = size * self.merge_size**2
        merger = merged * (merged + 1) + self.text_size * (merged + 1)
        deepstack = self.num_deepstack * (merger + 2 * merged)
        patches = size * (3 * self.num_frames * self.patch_size**2 + 1)
        return patches + size * self.table_side**2 + self.num_layers * layer + merger + 2 * size + deepstack


def read_qwen3_vl(raw: bytes, hidden_size: int) -> Qwen3VlEncoder:
    """Qwen3-VL. Raises ModelError."""
    hf = decode(raw, HfQwen3Vl, "config.json")
    return _with_marks(hf, hidden_size, hf.vision_config.deepstack_visual_indexes)


def read_qwen35(raw: bytes, hidden_size: int) -> Qwen3VlEncoder:
    """Qwen3.5, whose text model is given the embeddings alone. Raises ModelError."""
    return _with_marks(decode(raw, HfQwen35, "config.json"), hidden_size, ())


def _with_marks(hf: HfQwen3Vl, hidden_size: int, taken: tuple[int, ...]) -> Qwen3VlEncoder:
    ids = hf.image_token_id, hf.video_token_id
    encoder = qwen3_encoder(hf.vision_config, ids, hidden_size, taken)
    marks = MomentMarks(
        row_id=hf.video_token_id,
        start_id=hf.vision_start_token_id,
        end_id=hf.vision_end_token_id,
        form="<{:.1f} seconds>",
        time_first=True,
        replaces_own=True,
    )
    return structs.replace(encoder, spanning=frozenset({MediaKind.VIDEO}), moments=marks)


def qwen3_encoder(
    vision: HfVision3,
    ids: tuple[int, int],
    hidden_size: int,
    taken: tuple[int, ...],
    tokens_per_s: float = 0.0,
) -> Qwen3VlEncoder:
    """The encoder of Qwen3-VL, Qwen3.5 and Qwen3-Omni. `ids`: of the tokens that stand for images and videos;
    `taken`: its layers whose outputs the text model is given. Raises ModelError."""
    check_output("out_hidden_size", vision.out_hidden_size, hidden_size)
    if len(set(taken)) < len(taken) or any(not 0 <= layer < vision.depth for layer in taken):
        raise ModelError(
            f"config.json: vision_config.deepstack_visual_indexes {list(taken)} must be different layers of "
            f"the {vision.depth} of vision_config.depth; restore the file from the model's source"
        )
    return checked(
        Qwen3VlEncoder(
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
            output_size=hidden_size * (1 + len(taken)),
            is_gated=False,
            tokens_per_s=tokens_per_s,
            has_patch_bias=True,
            video_bounds=(128 * 32 * 32, 768 * 32 * 32),
            text_size=hidden_size,
            deepstack_layers=taken,
            table_side=isqrt(vision.num_position_embeddings),
        )
    )
