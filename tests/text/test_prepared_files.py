"""Files that were prepared before: which are known, and what is kept of them."""

from base64 import b64encode
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from runtime.media_kind import MediaKind
from runtime.messages.media import Media, MediaSource
from runtime.text.prepared_files import PART_CHARS, PreparedFiles, are_inline, keys_of

SOUND = Media(kind=MediaKind.AUDIO, param="file", digest=b"one", values=np.zeros(3, np.float32))
LARGE = "A" * (2 * PART_CHARS + 5)


def named(url: str = "", kind: MediaKind = MediaKind.IMAGE, **more: Any) -> MediaSource:
    return MediaSource(kind=kind, param="image", url=url, **more)


def test_all_files_of_a_request_are_known_or_none() -> None:
    files = PreparedFiles[str](100)
    files.add(b"a", "one", 40)
    assert files.find([b"a"]) == ["one"] and files.find([b"a", b"b"]) is None and files.find([]) is None
    files.add(b"b", "two", 50)
    assert files.find([b"b", b"a", b"b"]) == ["two", "one", "two"]


def test_the_least_recently_used_are_dropped() -> None:
    files = PreparedFiles[str](100)
    for key in (b"a", b"b"):
        files.add(key, key.decode(), 40)
    assert files.find([b"a"]) == ["a"]
    files.add(b"c", "c", 30)
    assert files.find([b"b"]) is None and files.find([b"a", b"c"]) == ["a", "c"] and files.num_bytes == 70
    files.add(b"d", "larger than all", 101)
    assert files.find([b"d"]) is None and files.num_bytes == 70
    files.add(b"a", "again", 10)
    assert files.find([b"a"]) == ["again"] and files.num_bytes == 40


@pytest.mark.parametrize(
    ("sources", "inline"),
    [
        ([named("data:image/png;base64,AAAA"), named(base64="AAAA")], True),
        ([named("DATA:image/png;base64,AAAA")], True),
        ([named("https://example.com/a.png")], False),
        ([named("file:///a.png")], False),
        ([named(base64="AAAA"), named("http://a/b")], False),
        ([named(data=b"x")], False),
        ([named(decoded=SOUND)], True),
        ([], False),
    ],
)
def test_what_a_url_names_may_change(sources: list[MediaSource], inline: bool) -> None:
    assert are_inline(sources) is inline


@pytest.mark.parametrize(
    "other",
    [
        ([named(base64=LARGE + "B")], ""),
        ([named(base64=LARGE, kind=MediaKind.VIDEO)], ""),
        ([named(base64=LARGE, has_sound=True)], ""),
        ([named(base64=LARGE)], "another tenant"),
        ([named(base64=LARGE), named(base64="AAAA")], ""),
    ],
    ids=["text", "kind", "sound", "realm", "number of images"],
)
def test_keys_differ_where_preparations_may(other: tuple[list[MediaSource], str]) -> None:
    assert keys_of(*other)[0] != keys_of([named(base64=LARGE)], "")[0]


def test_equal_files_have_equal_keys() -> None:
    text = b64encode(b"an image").decode()
    one, other = keys_of([named(base64=text), named(base64=text)], ""), keys_of([named(base64=text)] * 2, "")
    assert one == other and one[0] != one[1], "the second image of a prompt may be prepared otherwise"
    assert len(keys_of([named(base64="half a pair \ud83d")], "")) == 1


def test_a_decoded_file_is_known_by_what_it_was_decoded_from() -> None:
    keys = keys_of([named(decoded=SOUND)], "")
    assert keys == keys_of([named(decoded=structs.replace(SOUND, param="other"))], "")
    assert keys != keys_of([named(decoded=structs.replace(SOUND, digest=b"other"))], "")
