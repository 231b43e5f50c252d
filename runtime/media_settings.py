"""From the options of images, videos and sounds to the settings of media/, which loads them."""

import msgspec
from msgspec import structs

from runtime.media.settings import DecodeLimits, MediaSettings
from runtime.messages.media import MediaKind, SoundLimits
from runtime.options.plan import Plan


def media_settings(plan: Plan, sounds: SoundLimits | None) -> MediaSettings:
    """What may be fetched and decoded for requests to a model that takes such sounds; None: it takes none."""
    multimodal = plan.multimodal
    # the rules of options/rules/media.py have checked both
    video = msgspec.convert((multimodal.mm_process_config or {}).get("video", {}), dict[str, int | float])
    decoded = {name: value for name, value in video.items() if name in DecodeLimits.__struct_fields__}
    limits = msgspec.convert(multimodal.limit_mm_data_per_request or {}, dict[MediaKind, int])
    decode = msgspec.convert(decoded, DecodeLimits)
    if sounds is not None:
        longest_s = decode.max_audio_s if sounds.is_cut else sounds.max_s
        decode = structs.replace(decode, sound_rate=sounds.rate, max_audio_s=longest_s)
    return MediaSettings(
        timeout_s=multimodal.mm_per_request_timeout,
        max_fetches=multimodal.mm_max_concurrent_calls,
        max_host_bytes=int(multimodal.mm_host_memory_gb * (1 << 30)),
        max_files=limits,
        domains=frozenset(name.lower().rstrip(".") for name in multimodal.allowed_media_domains),
        folder=multimodal.allowed_local_media_path,
        decode=decode,
    )
