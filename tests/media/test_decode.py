"""Real files of every kind, decoded; damaged ones, refused."""

import os
import struct
import sys
import zlib
from base64 import b64encode, urlsafe_b64encode
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pillow_heif import register_heif_opener

from runtime.media.decode import decode_file
from runtime.media.decode_messages import DecodeError, DecodeRequest, DecodeResult, TextPlace
from runtime.media.settings import DecodeLimits
from runtime.media.videos import sampled
from runtime.messages.media import MediaKind
from tests.media.files import RATE, av_sound, image, pixels, sound, tone, video


def decoded(
    kind: MediaKind, data: bytes, *, is_base64: bool = False, **limits: Any
) -> tuple[DecodeResult, np.ndarray]:
    fd = os.memfd_create("test")
    os.write(fd, data)
    text = TextPlace(0, len(data)) if is_base64 else None
    return decode_file(fd, DecodeRequest(kind, text, 10.0, DecodeLimits(**limits)))


def picture(data: bytes, **limits: Any) -> np.ndarray:
    return decoded(MediaKind.IMAGE, data, **limits)[1]


@pytest.mark.parametrize(
    ("kind", "more", "most"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("WEBP", {"quality": 95}, 24),
        ("JPEG", {"quality": 95}, 12),
        ("GIF", {}, 40),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("TIFF", {"compression": "jpeg", "quality": 95}, 12),
    ],
)
def test_images_have_their_pixels(kind: str, more: dict[str, Any], most: int) -> None:
    values = picture(image(kind, **more))
    assert values.dtype == np.uint8 and values.shape == (1, 24, 40, 3)
    assert np.abs(values[0].astype(int) - pixels()).max() <= most


def test_a_photo_is_turned_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the picture's top is at the right of the file
    values = picture(image("JPEG", exif=exif, quality=95))
    assert values.shape == (1, 40, 24, 3)
    assert np.abs(values[0].astype(int) - np.rot90(pixels(), -1)).max() <= 12


def heic(values: np.ndarray) -> bytes:
    """A photo as phones write it."""
    register_heif_opener()
    try:
        return image("HEIF", values, quality=95)
    finally:  # the runtime opens such files by another library
        Image.OPEN.pop("HEIF")
        Image.SAVE.pop("HEIF")


def test_a_photo_of_a_phone_is_opened() -> None:
    data = heic(pixels(64, 96))
    assert data[4:8] == b"ftyp" and data[8:12] == b"heic"
    values = picture(data)
    assert values.shape == (1, 64, 96, 3) and np.abs(values[0].astype(int) - pixels(64, 96)).max() <= 24
    for bad in (data[:200], data[: len(data) // 2]):
        with pytest.raises(DecodeError, match="damaged image|none of"):
            picture(bad)
    with pytest.raises(DecodeError, match="96 x 64 pixels"):
        picture(data, max_pixels=6000)


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (200, 100, 0)]
    for kind in ("GIF", "WEBP", "PNG"):
        values = picture(image(kind, frames[0], save_all=True, append_images=frames[1:]))
        assert values.shape == (1, 8, 8, 3) and np.abs(values.astype(int) - 200).max() <= 2, kind


def test_colours_of_print_become_those_of_screens() -> None:
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))  # red
    red = picture(image("JPEG", cmyk, quality=95))[0, 4, 4]
    assert red[0] > 240 and red[1] < 15 and red[2] < 15


def test_sixteen_bits_are_scaled_not_cut() -> None:
    deep = np.array([[0, 0x0180, 0x8000, 0xFFFF]], np.uint16)
    assert picture(image("PNG", deep))[0, 0, :, 0].tolist() == [0, 1, 128, 255]
    assert picture(image("TIFF", deep))[0, 0, :, 0].tolist() == [0, 1, 128, 255]


def test_transparency_is_over_white() -> None:
    values = np.zeros((1, 3, 4), np.uint8)
    values[0, :, 3] = (0, 128, 255)
    assert picture(image("PNG", values))[0, 0, :, 0].tolist() == [255, 127, 0]
    palette = Image.new("P", (1, 1))
    palette.putpalette([10, 20, 30])
    assert picture(image("PNG", palette)).ravel().tolist() == [10, 20, 30]
    assert picture(image("PNG", palette, transparency=0)).ravel().tolist() == [255, 255, 255]
    assert picture(image("PNG", np.array([[7, 9]], np.uint8)))[0, 0].tolist() == [[7] * 3, [9] * 3]


def bomb(side: int) -> bytes:
    """A PNG of some kilobytes that has side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (image("PNG")[:100], "damaged image"),
        (image("JPEG")[:400], "damaged image"),
        (image("TIFF")[:400], "damaged image|none of"),
        (b"", "none of PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG, JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "none of PNG, JPEG"),
        (bomb(20_000), "20000 x 20000 pixels"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 64, "none of PNG, JPEG"),
        (video("mp4", "mpeg4"), "none of PNG, JPEG"),
    ],
    ids=["png", "jpeg", "tiff", "empty", "svg", "eps", "bomb", "junk", "video"],
)
def test_bad_images_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        picture(data)


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "mpeg4"), ("webm", "libvpx"), ("avi", "mpeg4")])
def test_videos_are_sampled_at_even_distances(kind: str, codec: str) -> None:
    result, values = decoded(MediaKind.VIDEO, video(kind, codec))
    assert values.dtype == np.uint8 and values.shape == result.shape == (6, 48, 64, 3)  # 3 s, 2 a second
    assert result.rate == 10
    assert result.frame_times_s == pytest.approx([i / 10 for i in (0, 6, 12, 17, 23, 29)], abs=0.002)
    shown = values.mean((1, 2, 3))
    assert shown == pytest.approx([8 * i for i in (0, 6, 12, 17, 23, 29)], abs=8)


def test_the_operator_says_how_many_frames() -> None:
    data = video("mp4", "mpeg4")
    for limits, count in (({"num_frames": 4}, 4), ({"fps": 5.0}, 15), ({"fps": 5.0, "max_frames": 8}, 8)):
        assert len(decoded(MediaKind.VIDEO, data, **limits)[1]) == count
    assert sampled(3, 10.0, DecodeLimits(num_frames=8)) == [0, 1, 2]
    assert sampled(1, 10.0, DecodeLimits()) == [0]


@pytest.mark.parametrize(
    ("data", "words", "limits"),
    [
        (video("mp4", "mpeg4")[:600], "damaged video|no frames|no video", {}),
        (video("webm", "libvpx")[:300], "damaged video|no frames|no video", {}),
        (image("PNG"), "none of MP4", {}),
        (av_sound("mp4", "aac"), "no video", {}),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n", "none of MP4", {}),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "none of MP4", {}),
        (video("mp4", "mpeg4"), "lasts over 1 s", {"max_video_s": 1.0}),
        (video("mp4", "mpeg4"), "frames of 3072 pixels", {"max_pixels": 3000}),
        (video("mp4", "mpeg4"), "6 sampled frames", {"max_value_bytes": 50_000}),
    ],
    ids=["mp4", "webm", "png", "sound", "hls", "concat", "long", "wide", "large"],
)
def test_bad_videos_are_refused(data: bytes, words: str, limits: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match=words):
        decoded(MediaKind.VIDEO, data, **limits)


@pytest.mark.parametrize(("kind", "most"), [("WAV", 1e-4), ("FLAC", 1e-4), ("OGG", 0.1), ("MP3", 0.1)])
def test_sounds_are_mono_at_their_own_rate(kind: str, most: float) -> None:
    result, values = decoded(MediaKind.AUDIO, sound(kind))
    assert values.dtype == np.float32 and values.ndim == 1 and result.rate == RATE
    assert len(values) == pytest.approx(RATE / 2, abs=1200)
    assert np.abs(values).max() == pytest.approx(0.5, abs=0.05)
    if len(values) == RATE // 2:
        assert np.abs(values - tone()[:, 0]).max() <= most


def test_channels_become_their_mean() -> None:
    values = decoded(MediaKind.AUDIO, sound("WAV", tone(channels=2), subtype="FLOAT"))[1]
    assert values == pytest.approx(tone()[:, 0] * 0.75, abs=1e-6)


@pytest.mark.parametrize(("kind", "codec", "rate"), [("mp4", "aac", 16_000), ("webm", "libopus", 48_000)])
def test_sounds_of_video_containers(kind: str, codec: str, rate: int) -> None:
    result, values = decoded(MediaKind.AUDIO, av_sound(kind, codec, rate))
    assert result.rate == rate and len(values) == pytest.approx(rate / 2, abs=rate / 8)
    assert np.abs(values).max() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("data", "words", "limits"),
    [
        (sound("FLAC")[:60], "damaged sound|no sound", {}),
        (sound("WAV")[:20], "damaged sound|no sound", {}),
        (b"ID3" + b"\xff" * 100, "damaged sound|no sound", {}),
        (image("PNG"), "none of WAV", {}),
        (sound("WAV"), "lasts over 0.1 s", {"max_audio_s": 0.1}),
        (sound("WAV"), "too many samples", {"max_value_bytes": 1000}),
        (sound("WAV", np.full(100, np.nan, np.float32), subtype="FLOAT"), "no numbers", {}),
    ],
    ids=["flac", "wav", "mp3", "png", "long", "large", "nan"],
)
def test_bad_sounds_are_refused(data: bytes, words: str, limits: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match=words):
        decoded(MediaKind.AUDIO, data, **limits)


def test_base64_is_read_as_clients_write_it() -> None:
    data = image("PNG")
    whole = decoded(MediaKind.IMAGE, data)
    for text in (b64encode(data), b64encode(data).rstrip(b"="), urlsafe_b64encode(data)):
        result, values = decoded(MediaKind.IMAGE, text[:80] + b"\r\n" + text[80:], is_base64=True)
        assert result == whole[0] and np.array_equal(values, whole[1])
    for text in (b"A", b"AB*D", b"AB=CD"):
        with pytest.raises(DecodeError, match="base64"):
            decoded(MediaKind.IMAGE, text, is_base64=True)


def test_a_file_names_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = image("PNG")
    monkeypatch.delitem(sys.modules, "runtime.media.images")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DecodeError, match=r"needs PIL.*runtime-serve\[media\]"):
        picture(data)
