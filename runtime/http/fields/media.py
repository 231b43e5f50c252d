"""Images, videos and sounds in bodies: what the served model takes of them, and in which order."""

from collections.abc import Sequence

from msgspec import structs

from runtime.errors import InvalidRequest
from runtime.json_value import Fields
from runtime.media.url import scheme_of
from runtime.media_kind import NAMES
from runtime.messages.media import MediaKind, MediaSource

SCHEMES = ("data", "http", "https", "file")


class MediaParts:
    """The images, videos and sounds of one request, in the order of the prompt."""

    def __init__(self, kinds: frozenset[MediaKind] = frozenset(), *, with_video_sounds: bool = False) -> None:
        """`kinds`: what the served model takes: Limits.media_kinds; `with_video_sounds`: it is given the
        sounds of videos, too."""
        self.kinds, self.with_video_sounds = kinds, with_video_sounds
        self.sources: list[MediaSource] = []

    def add(self, source: MediaSource) -> Fields:
        """Adds one. -> the part of a chat template that stands for it. Raises InvalidRequest where the model
        takes none of its kind."""
        if source.kind not in self.kinds:
            taken = ", ".join(["text", *(NAMES[kind] for kind in sorted(self.kinds))])
            raise InvalidRequest(
                f"{source.param}: this model takes no {NAMES[source.kind]}; send {taken} alone",
                param=source.param,
            )
        if self.with_video_sounds and source.kind is MediaKind.VIDEO:
            if MediaKind.AUDIO not in self.kinds:
                raise InvalidRequest(
                    "use_audio_in_video: this model takes no sounds; leave it out", param="use_audio_in_video"
                )
            source = structs.replace(source, has_sound=True)
        self.sources.append(source)
        kind = source.kind.value
        return {"type": kind, kind: ""}  # templates ask for the type, or whether there is such a field


def url_or_base64(text: str, kind: MediaKind, param: str) -> MediaSource:
    """What a text names that is either a URL or a file in base64."""
    if scheme_of(text) in SCHEMES:
        return MediaSource(kind=kind, param=param, url=text)
    return MediaSource(kind=kind, param=param, base64=text)


MediaField = str | list[str | list[str] | None] | None  # of one prompt, or one entry for each


def media_of_prompts(
    fields: Sequence[tuple[str, MediaKind, MediaField]],
    count: int,
    is_batch: bool,
    kinds: frozenset[MediaKind],
    *,
    with_video_sounds: bool = False,
) -> list[tuple[MediaSource, ...]]:
    """The media of each of `count` prompts: of all given fields (name, kind, value), one after the other.
    `with_video_sounds`: as in MediaParts. Raises InvalidRequest."""
    each = [MediaParts(kinds, with_video_sounds=with_video_sounds) for _ in range(count)]
    for name, kind, value in fields:
        for i, texts in enumerate(_entries(value, name, count, is_batch)):
            path = f"{name}[{i}]" if is_batch and isinstance(value, list) else name
            for j, text in enumerate(texts):
                param = path if isinstance(value, str) else f"{path}[{j}]"
                each[i].add(url_or_base64(text, kind, param))
    return [tuple(one.sources) for one in each]


def _entries(value: MediaField, name: str, count: int, is_batch: bool) -> list[list[str]]:
    """The texts of a field for each prompt. A single text is for all of them."""
    if not value:
        return [[]] * count
    if isinstance(value, str):
        return [[value]] * count
    if not is_batch:  # one list, or one within a list
        if len(value) == 1 and isinstance(value[0], list):
            return [value[0]]
        if any(not isinstance(one, str) for one in value):
            raise InvalidRequest(f"{name} must be a text, or a list of texts", param=name)
        return [[one for one in value if isinstance(one, str)]]
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", param=name)
    return [[one] if isinstance(one, str) else one or [] for one in value]
