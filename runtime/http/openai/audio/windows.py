"""Sounds that are longer than the model takes at once: cut where they are quiet."""

import numpy as np

QUIET_S = 0.1  # of the stretch in whose middle a sound is cut
SEARCHED = 6  # a sound is cut within the last of so many parts of a window


def windows(samples: np.ndarray, rate: int, longest_s: float) -> list[tuple[int, int]]:
    """Begin and end of parts of a sound, float32 [samples], that follow on each other and last up to
    `longest_s` each. What is cut, is cut at the quietest place."""
    longest, begin = int(longest_s * rate), 0
    found = []
    while len(samples) - begin > longest:
        end = begin + longest
        searched = samples[end - max(longest // SEARCHED, 1) : end]
        cut = end - len(searched) + quietest(searched, max(int(QUIET_S * rate), 1))
        found.append((begin, cut))
        begin = cut
    return [*found, (begin, len(samples))]


def quietest(samples: np.ndarray, size: int) -> int:
    """The middle of the stretch of `size` samples that has the least energy; at least 1."""
    energy = np.concatenate(([0.0], np.cumsum(samples.astype(np.float64) ** 2)))
    size = min(size, len(samples))
    return max(int((energy[size:] - energy[:-size]).argmin()) + size // 2, 1)
