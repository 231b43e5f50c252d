"""Sizes of vision towers of CLIP's kind. Torch-free."""

from msgspec import Struct


class ClipTower(Struct, frozen=True, kw_only=True):
    """The layers of a vision tower that are computed."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int  # height and width in pixels
    patch_size: int
    eps: float
    activation: str  # one of ACTIVATIONS

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def layer_weights(self) -> int:
        """Numbers in the weights of a layer."""
        size, inner = self.hidden_size, self.intermediate_size
        return 4 * size * (size + 1) + 2 * size * inner + inner + 5 * size
