"""Real files, made in memory."""

import io
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image

RATE = 16_000


def pixels(height: int = 24, width: int = 40, channels: int = 3) -> np.ndarray:
    """uint8 [height, width, channels], smooth, so that lossy formats keep them."""
    rows, columns = np.mgrid[0:height, 0:width]
    planes = [rows * 255 // height, columns * 255 // width, (rows + columns) * 127 // (height + width)]
    return np.stack([*planes, planes[0]][:channels], -1).astype(np.uint8)


def image(kind: str, values: np.ndarray | Image.Image | None = None, **more: Any) -> bytes:
    """An image file of a format of Pillow's."""
    picture = (
        values if isinstance(values, Image.Image) else Image.fromarray(pixels() if values is None else values)
    )
    with io.BytesIO() as out:
        picture.save(out, kind, **more)
        return out.getvalue()


def video(kind: str, codec: str, frames: int = 30, rate: int = 10, size: tuple[int, int] = (64, 48)) -> bytes:
    """A video whose frame i is grey of brightness 8 i."""
    with io.BytesIO() as out:
        with av.open(out, "w", format=kind) as container:
            stream: Any = container.add_stream(codec, rate=rate)
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
            for i in range(frames):
                values = np.full((size[1], size[0], 3), 8 * i % 256, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
            container.mux(stream.encode())
        return out.getvalue()


def tone(seconds: float = 0.5, channels: int = 1, rate: int = RATE) -> np.ndarray:
    """float32 [samples, channels]: a tone of 440 Hz, half as loud in each further channel."""
    times_s = np.arange(int(seconds * rate)) / rate
    wave = 0.5 * np.sin(2 * np.pi * 440 * times_s)
    return np.stack([wave / 2**i for i in range(channels)], -1).astype(np.float32)


def sound(kind: str, values: np.ndarray | None = None, rate: int = RATE, **more: Any) -> bytes:
    """A sound file of a format of soundfile's."""
    with io.BytesIO() as out:
        soundfile.write(out, tone() if values is None else values, rate, format=kind, **more)
        return out.getvalue()


def av_sound(kind: str, codec: str, rate: int = RATE) -> bytes:
    """A sound in a container of FFmpeg's."""
    with io.BytesIO() as out:
        with av.open(out, "w", format=kind) as container:
            stream: Any = container.add_stream(codec, rate=rate, layout="mono")
            samples = tone(rate=rate).T
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout="mono")
            frame.sample_rate = rate
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return out.getvalue()


def film(frames: np.ndarray, samples: np.ndarray, rate: int = 2) -> bytes:
    """An MP4 video of RGB frames [frames, height, width, 3], `rate` a second, with a mono sound of RATE."""
    with io.BytesIO() as out:
        with av.open(out, "w", format="mp4") as container:
            stream: Any = container.add_stream("mpeg4", rate=rate)
            stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
            sounds: Any = container.add_stream("aac", rate=RATE, layout="mono")
            for values in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
            container.mux(stream.encode())
            frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), format="fltp", layout="mono")
            frame.sample_rate = RATE
            container.mux(sounds.encode(frame))
            container.mux(sounds.encode())
        return out.getvalue()
