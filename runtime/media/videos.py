"""Videos, by PyAV: frames sampled at even distances, with the times at which they are shown."""

import math
from collections.abc import Iterator

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from msgspec import Struct

from runtime.media.containers import HEAD_BYTES, video_demuxer
from runtime.media.decode_messages import DecodeError, File
from runtime.media.settings import DecodeLimits

OPTIONS = {"protocol_whitelist": "none"}  # a container opens nothing else


class Frames(Struct, frozen=True):
    """Sampled frames of a video: uint8 RGB [frames, height, width, 3]."""

    values: np.ndarray
    rate: float  # frames a second of the file
    times_s: tuple[float, ...]


def decode_video(file: File, limits: DecodeLimits) -> Frames:
    """The sampled frames. Raises DecodeError, and MemoryError."""
    demuxer = video_demuxer(file.read(HEAD_BYTES))
    file.seek(0)
    if demuxer is None:
        raise DecodeError("is none of MP4, MOV, WebM, Matroska and AVI")
    try:
        with av.open(file, "r", format=demuxer, container_options=OPTIONS) as container:
            if not container.streams.video:
                raise DecodeError("has no video")
            return _frames(container, container.streams.video[0], limits)
    except (av.error.FFmpegError, ValueError) as error:
        raise DecodeError(f"is a damaged video: {error}") from None


def sampled(num_frames: int, rate: float, limits: DecodeLimits) -> list[int]:
    """Which of the frames 0 .. num_frames - 1 are taken: `limits.num_frames` of them, or `limits.fps` for
    each second, at even distances, the first and the last among them."""
    count = limits.num_frames
    if count is None:
        count = max(round(num_frames / rate * limits.fps), 1)
    count = min(count, limits.max_frames, num_frames)
    return np.linspace(0, num_frames - 1, count).round().astype(int).tolist()


def _frames(container: InputContainer, stream: VideoStream, limits: DecodeLimits) -> Frames:
    stream.thread_type = "AUTO"
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    pixels = stream.codec_context.width * stream.codec_context.height
    if not 0 < rate <= 1000 or pixels == 0:
        raise DecodeError("is a damaged video: it has no rate or size")
    if pixels > limits.max_pixels:
        raise DecodeError(f"has frames of {pixels} pixels; send {limits.max_pixels} at most")
    times = _times(container, stream, rate, limits)
    wanted = sampled(len(times), rate, limits)
    if len(wanted) * pixels * 3 > limits.max_value_bytes:
        raise DecodeError(
            f"has {len(wanted)} sampled frames of {pixels} pixels, over {limits.max_value_bytes} bytes; send "
            "a smaller or shorter one"
        )
    container.seek(0)
    shape = (stream.codec_context.height, stream.codec_context.width, 3)
    values = np.empty((len(wanted), *shape), np.uint8)
    taken = _taken(container, stream, wanted)
    count = 0
    for values_at, frame in zip(values, taken, strict=False):
        image = frame.to_ndarray(format="rgb24")
        if image.shape != shape:
            raise DecodeError("changes its size on the way")
        values_at[...] = image
        count += 1
    if count == 0:
        raise DecodeError("has no frames that can be decoded")
    return Frames(values[:count], rate, tuple([times[index] for index in wanted[:count]]))


def _times(container: InputContainer, stream: VideoStream, rate: float, limits: DecodeLimits) -> list[float]:
    """When each frame is shown, in seconds from the first, by the packets of the file: their number in the
    header is not trusted."""
    base = float(stream.time_base or 0)
    times: list[float] = []
    for packet in container.demux(stream):
        if packet.size == 0:
            continue
        times.append(len(times) / rate if packet.pts is None else packet.pts * base)
        if len(times) > limits.max_video_s * 1000:
            raise DecodeError("has too many frames; send a shorter one")
    if not times:
        raise DecodeError("has no frames")
    times.sort()  # packets come in the order of decoding
    times = [time_s - times[0] for time_s in times]
    if not math.isfinite(times[-1]) or times[-1] > limits.max_video_s:
        raise DecodeError(f"lasts over {limits.max_video_s:g} s; send a shorter one")
    return times


def _taken(container: InputContainer, stream: VideoStream, wanted: list[int]) -> Iterator[av.VideoFrame]:
    rest = iter(wanted)
    index = next(rest)
    for number, frame in enumerate(container.decode(stream)):
        while number == index:
            yield frame
            if (index := next(rest, -1)) < 0:
                return
