"""Which container a file of video or sound is, by its first bytes.

FFmpeg is given the name of the demuxer that these bytes stand for, and no other: some of those that it would
guess (playlists, concatenations) open further files and addresses.
"""

from collections.abc import Mapping

HEAD_BYTES = 16

# first bytes and where they stand -> FFmpeg's name of the demuxer
_VIDEO = {
    (4, b"ftyp"): "mp4",
    (0, b"\x1a\x45\xdf\xa3"): "matroska",  # WebM, too
    (8, b"AVI "): "avi",
}
_SOUND = {
    (8, b"WAVE"): "wav",
    (0, b"fLaC"): "flac",
    (0, b"OggS"): "ogg",
    (0, b"ID3"): "mp3",
    (0, b"\xff\xfb"): "mp3",
    (0, b"\xff\xf3"): "mp3",
    (0, b"\xff\xf2"): "mp3",
    (0, b"\xff\xfa"): "mp3",
    (0, b"\xff\xf1"): "aac",
    (0, b"\xff\xf9"): "aac",
    (4, b"ftyp"): "mp4",
    (0, b"\x1a\x45\xdf\xa3"): "matroska",
}


def video_demuxer(head: bytes) -> str | None:
    """The demuxer of a video; None: it is none of those that are taken."""
    return _found(head, _VIDEO)


def sound_demuxer(head: bytes) -> str | None:
    """The demuxer of a sound; None: it is none of those that are taken."""
    return _found(head, _SOUND)


def _found(head: bytes, table: Mapping[tuple[int, bytes], str]) -> str | None:
    return next((name for (at, sign), name in table.items() if head[at : at + len(sign)] == sign), None)
