"""From a model's encoder of images, videos and sounds to what the scheduler knows of encodings."""

from runtime.models.config.media_config import num_kept_rows, sees_whole_images
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.transformers_media import TransformersEncoder
from runtime.scheduling.encodings import EncodingConfig


def encoding_config(model: ModelConfig) -> EncodingConfig | None:
    """What the scheduler knows of a model's encodings; None: the model takes text alone."""
    if model.media is None:
        return None
    # transformers' code does not stop between layers, and rows of other servers are only copied
    is_cut = not (model.encodes_elsewhere or isinstance(model.media, TransformersEncoder))
    return EncodingConfig(
        max_rows=num_kept_rows(model.media), keeps_whole=sees_whole_images(model.media), is_cut=is_cut
    )
