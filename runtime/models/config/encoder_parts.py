"""What the configurations of encoders share. Torch-free."""

from msgspec import Struct

from runtime.errors import ModelError

ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh", "relu", "silu")


class MomentMarks(Struct, frozen=True, kw_only=True):
    """How a prompt names the times of a video, whose moments are apart from each other there."""

    row_id: int  # the token that stands for a row of a moment
    start_id: int  # the token before the tokens of a moment
    end_id: int  # the token behind them
    form: str  # text of a time in seconds, for str.format
    # the time is that of the moment's middle and stands before it; else that of its first frame, in whole
    # seconds, and stands behind it
    time_first: bool
    # the placeholder's own marks, `start_id` before it and `end_id` behind it, are replaced with it
    replaces_own: bool


def check_activation(field: str, name: str) -> None:
    """Raises ModelError for an activation that models/vision/activations.py has not."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"config.json: {field} {name} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )


def contradiction(what: str) -> ModelError:
    """The error for something in config.json that no encoder here has."""
    return ModelError(
        f"config.json: {what}, which is not supported; restore the file from the model's source, or set "
        "--enable-multimodal false to serve text alone"
    )


def merge_of(field: str, ratio: float, side: int) -> int:
    """How many rows and columns of patches become one row of an encoding, by the ratio that config.json has
    in `field`. `side`: rows and columns of patches. Raises ModelError for a ratio that does not divide
    these."""
    merge = round(1 / ratio) if ratio > 0 else 0
    if not merge or merge * ratio != 1 or not side or side % merge:
        raise contradiction(f"{field} {ratio} does not divide the {side} patches of a side")
    return merge


def num_computed_layers(layer: int | list[int], count: int) -> int:
    """How many of a tower's `count` layers are computed for vision_feature_layer `layer`: the hidden states
    behind so many, from the end where it is below zero. Raises ModelError."""
    if isinstance(layer, list):
        raise ModelError(
            f"config.json: vision_feature_layer {layer} joins several layers, which is not supported; set "
            "--enable-multimodal false to serve text alone"
        )
    num_layers = layer if layer >= 0 else count + 1 + layer
    if not 0 <= num_layers <= count:
        raise ModelError(
            f"config.json: vision_feature_layer {layer} is none of the {count} layers of vision_config; "
            "restore the file from the model's source"
        )
    return num_layers
