"""The kinds of media."""

from enum import StrEnum


class MediaKind(StrEnum):
    """What a file holds for a model. Values are the names of parts in chat templates."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


NAMES = {MediaKind.IMAGE: "images", MediaKind.VIDEO: "videos", MediaKind.AUDIO: "sounds"}
"""Several files of a kind, in messages to clients."""
