"""Mel spectrograms as Whisper takes them (Radford et al., 2022): power of overlapping frames under a Hann
window, summed by the mel filters of Slaney's Auditory Toolbox (1998), as logarithms within 80 dB of the
loudest."""

from functools import lru_cache

import numpy as np

from runtime.models.config.mel_config import MelConfig

FLOOR = 1e-10  # of a filter's power
RANGE = 8.0  # powers of ten below the loudest that are kept
LINEAR_HZ = 1000.0  # mels are linear in frequency up to here, and logarithmic beyond
HZ_PER_MEL = 200.0 / 3
MELS_PER_E = 27.0 / np.log(6.4)
TOP_HZ = 8000.0


def log_mels(samples: np.ndarray, config: MelConfig, frames: int, *, ends: bool = False) -> np.ndarray:
    """The first frames of a sound, float32 [samples], that silence follows up to the longest, or with `ends`
    its own mirror image: float32 [feature_size, frames]. `frames` covers all samples, but for less than a
    frame of a sound that ends, and is at most `config.max_frames` of one that does not."""
    size, hop = config.n_fft, config.hop_length
    whole = samples.astype(np.float64)
    if not ends:  # silence beyond what the frames see makes no difference
        whole = np.pad(whole, (0, max(min(config.num_samples, frames * hop + size) - len(samples), 0)))
    padded = np.pad(whole, size // 2, mode="reflect")
    starts = np.lib.stride_tricks.sliding_window_view(padded, size)[: frames * hop : hop]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    power = np.abs(np.fft.rfft(starts * window, axis=1)) ** 2
    levels = np.log10(np.maximum(power @ mel_filters(config), FLOOR))
    levels = np.maximum(levels, levels.max() - RANGE)
    return np.ascontiguousarray((levels.T + 4) / 4, np.float32)


@lru_cache(maxsize=4)
def mel_filters(config: MelConfig) -> np.ndarray:
    """Triangles of equal area over frequencies, float64 [n_fft // 2 + 1, feature_size]."""
    edges = hz_of(np.linspace(0.0, mel_of(TOP_HZ), config.feature_size + 2))
    bins = np.linspace(0, config.sampling_rate // 2, config.n_fft // 2 + 1)
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    rising = (bins[:, None] - low) / (middle - low)
    falling = (high - bins[:, None]) / (high - middle)
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (high - low))


def mel_of(hz: float) -> float:
    """The mel of a frequency beyond LINEAR_HZ."""
    return float(LINEAR_HZ / HZ_PER_MEL + np.log(hz / LINEAR_HZ) * MELS_PER_E)


def hz_of(mels: np.ndarray) -> np.ndarray:
    """Frequencies of mels."""
    bend = LINEAR_HZ / HZ_PER_MEL
    return np.where(mels < bend, mels * HZ_PER_MEL, LINEAR_HZ * np.exp((mels - bend) / MELS_PER_E))
