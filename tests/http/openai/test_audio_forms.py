"""Forms of /v1/audio, windows of sounds, segments and subtitles."""

import numpy as np
import pytest

from runtime.errors import InvalidRequest
from runtime.http.openai.audio.body import read_fields
from runtime.http.openai.audio.form import Form, read_form
from runtime.http.openai.audio.segments import Segment, Window, clock, segments, srt, vtt
from runtime.http.openai.audio.windows import windows

TYPE = "multipart/form-data; boundary=b"
ZERO = 1000  # the first timestamp


def form(*parts: tuple[str, str, bytes], end: bytes = b"--b--\r\n") -> bytes:
    """A form of (name, filename or "", data)."""
    found = b""
    for name, filename, data in parts:
        more = f'; filename="{filename}"' if filename else ""
        found += f'--b\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
        found += data + b"\r\n"
    return found + end


FILE = ("file", "a.wav", b"\x00\r\n--c\xff")


def test_forms_are_read() -> None:
    granularities = [("timestamp_granularities[]", "", one) for one in (b"word", b"segment")]
    found = read_form(TYPE, form(("model", "", b"m"), FILE, *granularities))
    assert found == Form(FILE[2], {"model": "m", "timestamp_granularities": ["word", "segment"]})


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("application/json", b"{}", "the body is no form"),
        ("multipart/form-data", form(FILE), "the body is no form"),
        (TYPE, b"nothing", "can't be read"),
        (TYPE, form(FILE, end=b""), "has no end"),
        (TYPE, form(("model", "", b"m")), "has 0 files"),
        (TYPE, form(FILE, FILE), "has 2 files"),
        (TYPE, form(("file", "", b"text")), "has 0 files"),
        (TYPE, form(FILE, ("model", "", b"m"), ("model", "", b"m")), "model twice"),
        (TYPE, form(FILE, *[("x[]", "", b"")] * 64), "over 64 fields"),
    ],
)
def test_what_is_no_form_is_refused(kind: str, body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_form(kind, body)


def test_fields_have_types() -> None:
    body = read_fields(Form(b"", {"temperature": "0.5", "stream": "true", "seed": "7", "language": "de"}))
    assert (body.temperature, body.stream, body.seed, body.language) == (0.5, True, 7, "de")
    assert body.params((3, 4)).logit_bias == {3: -1000.0, 4: -1000.0}


def test_sounds_are_cut_where_they_are_quiet() -> None:
    samples = np.ones(2500, np.float32)
    samples[900:1000] = 0
    assert windows(samples, 1000, 1.0) == [(0, 950), (950, 1834), (1834, 2500)]
    assert windows(samples[:1000], 1000, 1.0) == [(0, 1000)]
    assert windows(samples[:1], 1000, 1.0) == [(0, 1)]


def decoded(ids: list[int]) -> str:
    return "".join(f" {id}" for id in ids)


def test_segments_stand_between_timestamps() -> None:
    first = Window(begin_s=0.0, end_s=2.0, token_ids=[ZERO, 1, 2, ZERO + 50, ZERO + 50, 3, ZERO + 75])
    second = Window(begin_s=2.0, end_s=3.0, token_ids=[4, ZERO + 500, 5])
    found = segments([first, second], ZERO, decoded, 0.0)
    assert [(one.id, one.start, one.end, one.text, one.seek) for one in found] == [
        (0, 0.0, 1.0, " 1 2", 0),
        (1, 1.0, 1.5, " 3", 0),
        (2, 2.0, 3.0, " 4", 200),
        (3, 3.0, 3.0, " 5", 200),
    ]


def test_subtitles() -> None:
    one = Segment(
        id=0,
        seek=0,
        start=3599.5,
        end=3661.25,
        text=" <b> & --> it",
        tokens=[],
        temperature=0.0,
        avg_logprob=0.0,
        compression_ratio=1.0,
    )
    assert srt([one]) == "1\n00:59:59,500 --> 01:01:01,250\n<b> & --> it\n\n"
    assert vtt([one]) == "WEBVTT\n\n00:59:59.500 --> 01:01:01.250\n&lt;b> &amp; --&gt; it\n\n"
    assert clock(0.0, ".") == "00:00:00.000"
