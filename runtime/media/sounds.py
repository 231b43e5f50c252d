"""Sounds, by soundfile where it knows the format, and by PyAV otherwise: mono, at the rate of the model where
it takes sounds, and of the file otherwise."""

import av
import numpy as np
import soundfile
from av.audio.stream import AudioStream

from runtime.media.containers import HEAD_BYTES, sound_demuxer
from runtime.media.decode_messages import DecodeError, File
from runtime.media.settings import DecodeLimits
from runtime.media.videos import OPTIONS

BLOCK = 1 << 18  # samples that are read at a time
MAX_CHANNELS = 64
_BY_SOUNDFILE = ("wav", "flac", "ogg", "mp3")


def decode_sound(file: File, limits: DecodeLimits) -> tuple[np.ndarray, float]:
    """float32 [samples], the mean of all channels, and samples a second. Raises DecodeError, and
    MemoryError."""
    demuxer = sound_demuxer(file.read(HEAD_BYTES))
    file.seek(0)
    if demuxer is None:
        raise DecodeError("is none of WAV, FLAC, Ogg, MP3, AAC, MP4 and WebM")
    try:
        return _by_soundfile(file, limits) if demuxer in _BY_SOUNDFILE else _by_av(file, demuxer, limits)
    except (soundfile.LibsndfileError, av.error.FFmpegError, ValueError) as error:
        raise DecodeError(f"is a damaged sound: {error}") from None


class _Samples:
    """Mono samples that are collected up to the limits."""

    def __init__(self, rate: float, limits: DecodeLimits) -> None:
        if not 1000 <= rate <= 768_000:
            raise DecodeError(f"has {rate:g} samples a second; 1000 to 768000 are taken")
        self.rate = rate
        self.parts: list[np.ndarray] = []
        self.count = 0
        self.limits = limits

    def add(self, block: np.ndarray) -> None:
        """Adds float32 [samples, channels]."""
        self.count += len(block)
        if self.count > self.limits.max_audio_s * self.rate:
            raise DecodeError(f"lasts over {self.limits.max_audio_s:g} s; send a shorter one")
        if self.count * 4 > self.limits.max_value_bytes:
            raise DecodeError("has too many samples; send a shorter one, or fewer samples a second")
        self.parts.append(block.mean(axis=1, dtype=np.float32))

    def whole(self) -> tuple[np.ndarray, float]:
        """All samples, and their rate."""
        if self.count == 0:
            raise DecodeError("has no sound that can be decoded")
        values = np.concatenate(self.parts)
        if not np.isfinite(values).all():
            raise DecodeError("has samples that are no numbers")
        rate = self.limits.sound_rate
        return (
            (values, self.rate) if rate in (None, self.rate) else (resampled(values, self.rate, rate), rate)
        )


def resampled(values: np.ndarray, rate: float, wanted: int) -> np.ndarray:
    """float32 [samples] of so many a second -> as many a second as are wanted."""
    resampler = av.AudioResampler(format="flt", layout="mono", rate=wanted)
    parts = []
    for start in range(0, len(values), BLOCK):
        frame = av.AudioFrame.from_ndarray(values[None, start : start + BLOCK], format="flt", layout="mono")
        frame.sample_rate = round(rate)
        parts += [one.to_ndarray()[0] for one in resampler.resample(frame)]
    parts += [one.to_ndarray()[0] for one in resampler.resample(None)]
    return np.concatenate(parts)[: -(-len(values) * wanted // round(rate))]


def _by_soundfile(file: File, limits: DecodeLimits) -> tuple[np.ndarray, float]:
    with soundfile.SoundFile(file) as sound:
        if sound.channels > MAX_CHANNELS:
            raise DecodeError(f"has {sound.channels} channels; {MAX_CHANNELS} are taken")
        samples = _Samples(float(sound.samplerate), limits)
        while len(block := sound.read(BLOCK // sound.channels, dtype="float32", always_2d=True)):
            samples.add(block)
    return samples.whole()


def _by_av(file: File, demuxer: str, limits: DecodeLimits) -> tuple[np.ndarray, float]:
    with av.open(file, "r", format=demuxer, container_options=OPTIONS) as container:
        if not container.streams.audio:
            raise DecodeError("has no sound")
        stream: AudioStream = container.streams.audio[0]
        if stream.channels > MAX_CHANNELS:
            raise DecodeError(f"has {stream.channels} channels; {MAX_CHANNELS} are taken")
        samples = _Samples(float(stream.rate or 0), limits)
        planar = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
        for frame in container.decode(stream):
            for block in planar.resample(frame):
                samples.add(block.to_ndarray().T)
        for block in planar.resample(None):
            samples.add(block.to_ndarray().T)
    return samples.whole()
