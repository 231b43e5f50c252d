"""What the images, videos and sounds of prompts took, as answers report it."""

from collections import Counter
from collections.abc import Iterable, Mapping

from runtime.json_value import Fields
from runtime.messages.media import MediaKind, MediaUsage


def media_fields(found: Iterable[MediaUsage | None]) -> Fields:
    """Fields next to `cached_tokens`, of all prompts of a request: SGLang's and vLLM's `image_tokens`,
    `video_tokens` and `audio_tokens`, and as extensions `cached_media` (how many were not encoded, as their
    tokens or their encoding were found) and `encode_seconds`. Empty where no prompt has any."""
    some = [one for one in found if one is not None]
    if not some:
        return {}
    return tokens_by_kind([one.tokens for one in some]) | {
        "cached_media": sum([one.num_inputs - one.num_encoded for one in some]),
        "encode_seconds": round(sum([one.encode_s for one in some]), 6),
    }


def cached_media_fields(found: Iterable[MediaUsage | None]) -> Fields:
    """Fields of `cached_tokens_details`: tokens of images, videos and sounds among the cached ones. Empty
    where no prompt has any."""
    return tokens_by_kind([one.cached_tokens for one in found if one is not None])


def tokens_by_kind(counts: Iterable[Mapping[MediaKind, int]]) -> Fields:
    """Sums of counts as fields: image_tokens, video_tokens, audio_tokens, of the kinds that are counted."""
    sums: Counter[MediaKind] = Counter()
    for one in counts:
        for kind, count in one.items():
            sums[kind] += count
    return {f"{kind.value}_tokens": count for kind, count in sums.items()}


def of_prompt(choices: Iterable[MediaUsage | None]) -> MediaUsage | None:
    """What one prompt took, of what its choices say: the one that was encoded for, where one was."""
    return max([one for one in choices if one is not None], key=lambda one: one.num_encoded, default=None)
