"""config.json of MiniCPM-V 4.6: its encoder of images and frames of videos. Torch-free."""

from typing import ClassVar, Literal

from msgspec import Struct

from runtime.media_kind import MediaKind
from runtime.models.config import sizes
from runtime.models.config.clip_config import ClipTower
from runtime.models.config.config_files import decode
from runtime.models.config.encoder_parts import contradiction
from runtime.models.config.gemma_vision_config import HfSiglip
from runtime.models.config.siglip_config import tower_of

WINDOW = 2  # rows and columns of patches that are joined, within the tower and behind it


class HfMiniCpmV(Struct, frozen=True):
    """What MiniCPM-V's config.json says of images, with the defaults of transformers."""

    vision_config: HfSiglip = HfSiglip()
    image_token_id: int | None = None
    video_token_id: int | None = None
    insert_layer_id: int = 6
    downsample_mode: Literal["4x", "16x"] = "16x"
    merge_kernel_size: tuple[sizes.Width, sizes.Width] = (WINDOW, WINDOW)
    merger_times: int = 1


class MiniCpmVEncoder(Struct, frozen=True, kw_only=True):
    """The encoder of MiniCPM-V 4.6: a SigLIP tower over images of any size, of whose patches squares are
    joined behind one of its layers, and again behind the last."""

    placeholder_id: int  # the token of a prompt that stands for an image
    video_placeholder_id: int | None  # the same of a video; None: the model takes none
    tower: ClipTower
    joined_layer: int | None  # behind which squares are joined; None: nowhere in the tower
    output_size: int  # hidden size of the text model
    has_token_grids: ClassVar[bool] = False  # its tokens have a position each

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """What it takes."""
        videos = () if self.video_placeholder_id is None else (MediaKind.VIDEO,)
        return frozenset({MediaKind.IMAGE, *videos})

    @property
    def merge_size(self) -> int:
        """Rows and columns of patches that become one row of the encoding."""
        return WINDOW if self.joined_layer is None else WINDOW**2

    @property
    def num_weights(self) -> int:
        """Numbers in all weights."""
        tower, size = self.tower, self.tower.hidden_size
        table = (3 * tower.patch_size**2 + 1 + tower.num_patches + 2) * size
        joined, inner = size * WINDOW**2, tower.intermediate_size * WINDOW**2
        window = 4 * size * (size + 1) + 2 * size + 2 * joined + inner * (joined + 1) + size * (inner + 1)
        merger = 2 * joined + joined * (joined + 1) + self.output_size * (joined + 1)
        return table + tower.num_layers * tower.layer_weights + window + merger


def read_minicpmv(raw: bytes, hidden_size: int) -> MiniCpmVEncoder | None:
    """MiniCPM-V 4.6; None: no token stands for images. Raises ModelError."""
    hf = decode(raw, HfMiniCpmV, "config.json")
    if hf.image_token_id is None:
        return None
    if hf.merge_kernel_size != (WINDOW, WINDOW) or hf.merger_times != 1:
        raise contradiction(
            f"merge_kernel_size {list(hf.merge_kernel_size)} and merger_times {hf.merger_times} are not "
            f"{[WINDOW, WINDOW]} and 1"
        )
    if not 0 <= hf.insert_layer_id < hf.vision_config.num_hidden_layers:
        raise contradiction(f"insert_layer_id {hf.insert_layer_id} is no layer of vision_config")
    return MiniCpmVEncoder(
        placeholder_id=hf.image_token_id,
        video_placeholder_id=hf.video_token_id,
        tower=tower_of(hf.vision_config, merge=1),
        joined_layer=None if hf.downsample_mode == "4x" else hf.insert_layer_id,
        output_size=hidden_size,
    )
