"""Pages of one layout in the host memory of another, and what checksums see."""

import os
from itertools import product

import numpy as np
import pytest

from runtime.devices.host_memory import HostPages
from runtime.messages.transfer import PageLayout, Section
from runtime.transfer.checksum import Checksum
from runtime.transfer.layout import RankPages, mismatch, section_of

TOKENS, HEADS, LAYERS, DIM = 4, 4, 4, 8  # bytes of a head's row


def ranks(width: int, stages: int, layout: str, heads: int = HEADS) -> RankPages:
    """Ranks with room for three pages."""
    own = max(1, heads // width)
    parts = (TOKENS * own * DIM,) * (2 * LAYERS // stages)
    pages = []
    for _ in range(width * stages):
        fd = os.memfd_create("pages")
        os.ftruncate(fd, 3 * sum(parts))
        pages.append(HostPages(fd, 3, parts, layout))
        os.close(fd)
    return RankPages(pages, [], TOKENS, stages, num_heads=heads)


def fill(pages: RankPages, host: int, heads: int = HEADS) -> np.ndarray:
    """Writes a page in which each byte says where it belongs; the same for any division."""
    values = np.random.default_rng(0).integers(0, 256, (2 * LAYERS, TOKENS, heads, DIM), dtype=np.uint8)
    per_stage = 2 * LAYERS // len(pages._stages)
    for index, stage in enumerate(pages._stages):
        for place, rank in enumerate(stage):
            own = max(1, heads // len(stage))
            first = place * heads // len(stage)
            for part in range(per_stage):
                rows = values[index * per_stage + part, :, first : first + own]
                rank.part(part)[host] = rows.reshape(-1)
    return values


def content(pages: RankPages, host: int) -> list[list[bytes]]:
    return [
        [bytes(rank.part(i)[host]) for i in range(len(rank.part_bytes))]
        for stage in pages._stages
        for rank in stage
    ]


DIVISIONS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 4)]


@pytest.mark.parametrize(("theirs", "own"), list(product(DIVISIONS, DIVISIONS)))
def test_a_page_arrives_whole(theirs: tuple[int, int], own: tuple[int, int]) -> None:
    sender, receiver = ranks(*theirs, "page_first"), ranks(*own, "layer_first")
    expected = ranks(*own, "layer_first")
    fill(sender, 1)
    fill(expected, 2)
    assert mismatch(sender.layout, receiver.layout) is None
    page = memoryview(b"".join(sender.views([1])))
    assert len(page) == sender.layout.page_bytes == 2 * LAYERS * TOKENS * HEADS * DIM
    receiver.write(2, page, sender.layout)
    assert content(receiver, 2) == content(expected, 2)
    if theirs == own:
        rest = page
        for target in receiver.views([1]):
            target[:], rest = rest[: len(target)], rest[len(target) :]
        receiver.copy([1])
        assert content(receiver, 1) == content(expected, 2)


@pytest.mark.parametrize(("width", "stages"), DIVISIONS)
@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_kv_split"])
def test_sections_of_pages_are_all_of_them(width: int, stages: int, layout: str) -> None:
    """On the way in a buffer, and in host memory; wherever the cuts are."""
    sender = ranks(width, stages, layout)
    fill(sender, 1)
    fill(sender, 2)
    whole = b"".join(sender.views([1, 2]))
    buffer = memoryview(bytearray(len(whole)))
    target = ranks(width, stages, "page_first")
    for stage, count in reversed(list(enumerate(sender.num_parts))):
        for first, end in ((0, 1), (1, count)):
            section = Section(stage, first, end)
            data = b"".join(sender.views([1, 2], section))
            for views in (section_of(buffer, sender.layout, section), target.views([0, 1], section)):
                assert sum(map(len, views)) == len(data)
                at = 0
                for view in views:
                    view[:] = data[at : at + len(view)]
                    at += len(view)
    assert buffer == whole and b"".join(target.views([0, 1])) == whole


def test_pages_side_by_side_are_one_view() -> None:
    pages = ranks(1, 1, "page_first")
    assert len(pages.views([0, 1, 2])) == 1 and len(pages.views([0, 2])) == 2
    assert len(ranks(2, 1, "page_first").views([0, 1])) == 4


def test_what_all_ranks_of_a_stage_have_is_stored() -> None:
    pages = ranks(2, 2, "page_first")
    assert pages.num_parts == [4, 4]
    assert pages.num_stored({0: 2, 1: 4, 2: 3}) == [2, 0]
    assert ranks(8, 1, "page_first").num_stored({0: 1, 2: 2, 4: 3, 6: 1}) == [1], "copies are not waited for"


def test_what_does_not_fit_is_refused() -> None:
    one = ranks(1, 1, "page_first").layout
    assert "tokens" in str(mismatch(PageLayout(8, one.num_ranks, one.parts), one))
    assert "sizes" in str(mismatch(PageLayout(TOKENS, 2, one.parts), one))
    assert "sizes" in str(mismatch(PageLayout(TOKENS, 1, (one.parts[0][:-1],)), one))
    assert "recurrent" in str(mismatch(PageLayout(TOKENS, 1, one.parts, (8,)), one))


def checksum(*parts: bytes) -> int:
    found = Checksum()
    for part in parts:
        found.add(memoryview(part))
    return found.value


def test_checksums_see_what_breaks() -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * 4096 + 100, dtype=np.uint8).tobytes()
    whole = checksum(data)
    for at in (0, 5000, 3 * 4096 - 1, len(data) - 1):
        broken = bytearray(data)
        broken[at] ^= 1
        assert checksum(bytes(broken)) != whole
    assert checksum(data[4096:8192] + data[:4096] + data[8192:]) != whole
    assert checksum(data[:-1]) != whole


@pytest.mark.parametrize("cuts", [(1,), (4096,), (5000, 5001), (100, 200, 4096, 12288), (12388,)])
def test_checksums_do_not_depend_on_how_bytes_are_divided(cuts: tuple[int, ...]) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * 4096 + 100, dtype=np.uint8).tobytes()
    ends = (*cuts, len(data))
    assert checksum(*(data[a:b] for a, b in zip((0, *ends), ends, strict=False))) == checksum(data)
