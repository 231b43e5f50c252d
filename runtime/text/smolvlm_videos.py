"""Videos of SmolVLM: each frame is one tile with its time before it, behind a sentence about the video, with
the texts and the arithmetic of transformers' processors on Pillow."""

from collections.abc import Callable
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct, structs

from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.config_files import decode
from runtime.models.config.image_config import Normalization, read_image_fields
from runtime.models.config.patch_image_config import video_fields
from runtime.models.config.row_image_config import LongestSize
from runtime.models.config.siglip_config import SiglipEncoder
from runtime.text.marked_tiles import MarkedTileProcessor
from runtime.text.media_prompts import Prepared
from runtime.text.number_words import number_words
from runtime.text.siglip_images import HALVES, LONGEST_EDGE, SplitConfig, check, open_siglip_images
from runtime.text.vocabulary import Vocabulary

RATE = 24.0  # frames a second of a video that does not say its own
INTRODUCTION = "You are provided the following series of {} frames from a {} [H:MM:SS] video.\n"
FRAME = "\nFrame from {:02d}:{:02d}:"
BEHIND = "\n\n"
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
# texts of tokens that may stand for a video: published tokenizers have no <video>, and tokens for later use
PLACEHOLDERS = ("<video>", "<|reserved_special_token_0|>")


class HfVideoSampling(Struct, frozen=True):
    """What older files say of the size of frames."""

    video_size: LongestSize = LongestSize(4 * 364)


class HfFrames(Normalization, frozen=True, kw_only=True):
    """What a model's files say of frames, with the defaults of transformers."""

    image_mean: tuple[float, float, float] = HALVES
    image_std: tuple[float, float, float] = HALVES
    size: LongestSize | None = None
    max_image_size: LongestSize = LongestSize(364)
    resample: int = 1  # Lanczos
    video_sampling: HfVideoSampling = HfVideoSampling()


class VideoProcessor:
    """Prepares the images and videos of SmolVLM; see MediaProcessor."""

    sounds = None
    is_attended = False

    def __init__(
        self,
        images: MarkedTileProcessor,
        frames: SplitConfig,
        encoder: SiglipEncoder,
        placeholder_id: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        """`frames`: how each is cut, to one tile; `placeholder_id`: the token that stands for a video;
        `encode`: makes tokens of text."""
        self.placeholder_ids = images.placeholder_ids | {MediaKind.VIDEO: placeholder_id}
        self._images, self._frames, self._encode = images, frames, encode
        self._row_id, self._num_rows = encoder.placeholder_id, encoder.num_rows
        self._digest_text = msgspec.json.encode(frames)

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are float32 [tiles, 3, size, size]; each frame of a video is a part of
        the file."""
        if media.kind is not MediaKind.VIDEO:
            return self._images.prepare(media)
        times = frame_times(media)
        first, *others = (self._frame(media, index, texts) for index, texts in enumerate(["", *times[1:]]))
        duration = timedelta(seconds=duration_s(media))
        introduction = INTRODUCTION.format(number_words(len(media.values)), duration)
        return structs.replace(first, parts=tuple(others), around=(introduction + times[0], BEHIND))

    def _frame(self, media: Media, index: int, before: str) -> Prepared:
        """Frame number `index`, behind a text."""
        tile = self._frames.cut(media.values[index], media.param)
        begin, end = self._encode(before + AROUND + WHOLE), self._encode(AROUND)
        return Prepared(
            kind=media.kind,
            digest=sha256(b"%b %b %d" % (media.digest, self._digest_text, index)).digest(),
            values=tile.values,
            token_ids=[*begin, *[self._row_id] * self._num_rows, *end],
            positions=np.arange(len(begin), len(begin) + self._num_rows, dtype=np.int32),
        )


def frame_times(media: Media) -> list[str]:
    """The text before each frame: its time in minutes and seconds."""
    # times come from the marks of the file's frames, and may lie a rounding below a whole second
    seconds = [int(time_s + 1e-6) for time_s in media.frame_times_s]
    return [FRAME.format(*divmod(one, 60)) for one in seconds]


def duration_s(media: Media) -> int:
    """How long a video is, in whole seconds: up to the end of its last frame, which is among those sampled
    where these are several."""
    rate = media.rate or RATE
    return int((round(media.frame_times_s[-1] * rate) + 1) / rate)


def open_smolvlm(
    folder: Path, encoder: SiglipEncoder, vocabulary: Vocabulary
) -> MarkedTileProcessor | VideoProcessor:
    """What prepares images and, where a token can stand for one, videos, as the model's folder says. Raises
    ModelError."""
    images = open_siglip_images(folder, encoder, vocabulary)
    texts = [vocabulary.files.special_tokens.get("video_token", PLACEHOLDERS[0]), *PLACEHOLDERS]
    known = [id for text in texts if (id := vocabulary.token_id(text)) is not None]
    if not known:
        return images
    frames = read_frames(folder, encoder)

    def encode(text: str) -> list[int]:
        return vocabulary.encode(text, add_special=False)

    return VideoProcessor(images, frames, encoder, known[0], encode)


def read_frames(folder: Path, encoder: SiglipEncoder) -> SplitConfig:
    """How frames are cut: resized as images are, and then to one tile. Raises ModelError."""
    if (raw := video_fields(folder)) is not None:
        hf, name = decode(msgspec.json.encode(raw[0]), HfFrames, raw[1]), raw[1]
    else:
        hf, name = read_image_fields(folder, HfFrames)
    size = hf.video_sampling.video_size if hf.size is None else hf.size
    config = SplitConfig(
        do_rescale=hf.do_rescale,
        rescale_factor=hf.rescale_factor,
        do_normalize=hf.do_normalize,
        image_mean=hf.image_mean,
        image_std=hf.image_std,
        size=structs.replace(size, longest_edge=min(size.longest_edge, LONGEST_EDGE)),
        max_image_size=hf.max_image_size,
        resample=hf.resample,
        do_image_splitting=False,
    )
    check(name, config, config.edge, config.resample, encoder)
    return config
