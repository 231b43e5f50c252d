"""What a model says with timestamps, as segments; and segments as subtitles.

Tokens of timestamps stand for multiples of 0.02 s since the beginning of the window. A segment stands between
two of them; the last one may lack its end, and lasts until that of the window then.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from runtime.messages.requests import TokenLogprob

STEP_S = 0.02


class Segment(Struct, frozen=True, kw_only=True):
    """A segment of a transcription, in the words of OpenAI's API."""

    id: int
    seek: int  # hundredths of a second at which the window of the segment begins
    start: float  # seconds
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float


class Window(Struct, frozen=True, kw_only=True):
    """A part of a sound, and what the model says of it."""

    begin_s: float
    end_s: float
    token_ids: list[int]
    logprobs: Sequence[TokenLogprob] = ()


def segments(
    parts: Iterable[Window], first_timestamp: int, decode: Callable[[list[int]], str], temperature: float
) -> list[Segment]:
    """The segments of a sound's windows. `first_timestamp`: id of the token of 0 s, and all above are
    timestamps; `decode`: the text of tokens."""
    found: list[Segment] = []
    for window in parts:
        for start_s, end_s, place, ids in spans(window, first_timestamp):
            text = decode(ids)
            logs = [one.logprob or 0.0 for one in window.logprobs[place : place + len(ids)]]
            found.append(
                Segment(
                    id=len(found),
                    seek=round(100 * window.begin_s),
                    start=start_s,
                    end=end_s,
                    text=text,
                    tokens=ids,
                    temperature=temperature,
                    avg_logprob=sum(logs) / len(logs) if logs else 0.0,
                    compression_ratio=compression_ratio(text),
                )
            )
    return found


def spans(window: Window, first_timestamp: int) -> list[tuple[float, float, int, list[int]]]:
    """The segments of a window that have text: begin and end in seconds of the sound, the place of the first
    token, and the tokens without timestamps."""
    found: list[tuple[float, float, int, list[int]]] = []
    start_s, place, ids = window.begin_s, 0, list[int]()
    for at, token in enumerate([*window.token_ids, None]):
        if token is not None and token < first_timestamp:
            place = place if ids else at
            ids.append(token)
            continue
        time_s = (
            window.end_s
            if token is None
            else min(window.begin_s + STEP_S * (token - first_timestamp), window.end_s)
        )
        if ids:
            found.append((round(start_s, 2), round(max(time_s, start_s), 2), place, ids))
        start_s, ids = time_s, []
    return found


def compression_ratio(text: str) -> float:
    """How many times as long a text is as its deflated form: text that repeats itself has a large one."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def srt(found: Iterable[Segment]) -> str:
    """Segments as SubRip subtitles."""
    return "".join(
        f"{number}\n{clock(one.start, ',')} --> {clock(one.end, ',')}\n{one.text.strip()}\n\n"
        for number, one in enumerate(found, 1)
    )


def vtt(found: Iterable[Segment]) -> str:
    """Segments as WebVTT subtitles."""
    lines = [f"{clock(one.start, '.')} --> {clock(one.end, '.')}\n{_cue(one.text)}\n\n" for one in found]
    return "WEBVTT\n\n" + "".join(lines)


def _cue(text: str) -> str:
    """Text without what begins a tag or ends the times of a cue."""
    return text.strip().replace("&", "&amp;").replace("<", "&lt;").replace("-->", "--&gt;")


def clock(seconds: float, mark: str) -> str:
    """Hours, minutes, seconds and thousandths."""
    total = round(1000 * seconds)
    minutes, rest = divmod(total, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
