"""What may be fetched and decoded, and how much of it."""

from collections.abc import Mapping

from msgspec import Struct

from runtime.messages.media import MediaKind

MAX_FILES = 256  # images, videos and sounds of one request, where no option says otherwise
MAX_FILE_BYTES = {MediaKind.IMAGE: 32 << 20, MediaKind.VIDEO: 256 << 20, MediaKind.AUDIO: 64 << 20}
MAX_VALUE_BYTES = 1 << 30  # decoded arrays of one request
MAX_HOST_BYTES = 8 << 30  # decoded and prepared arrays of all requests, where no option says otherwise
FRAMES_PER_S = 2.0  # of a video, where no option says otherwise
MAX_FRAMES = 128  # of a video, where no option says otherwise


class DecodeLimits(Struct, frozen=True, kw_only=True):
    """Limits of one file that is decoded."""

    max_pixels: int = 64 << 20  # of an image, and of one frame of a video
    max_value_bytes: int = 768 << 20  # of the decoded array
    max_video_s: float = 3600.0
    max_audio_s: float = 1800.0
    sound_rate: int | None = None  # samples a second of decoded sounds; None: those of the file
    fps: float = FRAMES_PER_S  # frames to sample of a second of video
    num_frames: int | None = None  # frames to sample of a video, whatever its length; None: by `fps`
    max_frames: int = MAX_FRAMES  # most frames to sample of a video
    memory_bytes: int = 2 << 30  # that a decoder may take beyond what it has when it starts
    cpu_s: int = 60  # seconds of a core that a decoder may take


class MediaSettings(Struct, frozen=True, kw_only=True):
    """What the operator allows."""

    timeout_s: float = 10.0  # for all files of one request: --mm-per-request-timeout
    max_fetches: int = 32  # files that are fetched at once: --mm-max-concurrent-calls
    max_decoders: int = 2  # files that are decoded at once
    max_host_bytes: int = MAX_HOST_BYTES  # decoded and prepared arrays: --mm-host-memory-gb
    # most files of each kind in one request: --limit-mm-data-per-request; a kind that is not named has
    # MAX_FILES
    max_files: Mapping[MediaKind, int] = {}
    # hosts that may be fetched from, private addresses of theirs included; empty: every host whose addresses
    # are public (--allowed-media-domains)
    domains: frozenset[str] = frozenset()
    folder: str | None = None  # that file: URLs may name files in; None: none (--allowed-local-media-path)
    decode: DecodeLimits = DecodeLimits()
