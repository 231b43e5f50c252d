"""From the options of images, videos and sounds to the settings of media/, which loads them."""

import msgspec

from runtime.media.settings import DecodeLimits, MediaSettings
from runtime.messages.media import MediaKind
from runtime.options.plan import Plan


def media_settings(plan: Plan) -> MediaSettings:
    """What may be fetched and decoded for requests."""
    multimodal = plan.multimodal
    # the rules of options/rules/media.py have checked both
    video = (multimodal.mm_process_config or {}).get("video", {})
    limits = msgspec.convert(multimodal.limit_mm_data_per_request or {}, dict[MediaKind, int])
    return MediaSettings(
        timeout_s=multimodal.mm_per_request_timeout,
        max_fetches=multimodal.mm_max_concurrent_calls,
        max_files=limits,
        domains=frozenset(name.lower().rstrip(".") for name in multimodal.allowed_media_domains),
        folder=multimodal.allowed_local_media_path,
        decode=msgspec.convert(video, DecodeLimits),
    )
