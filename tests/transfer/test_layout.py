"""Pages of one layout in the host memory of another, and what checksums see."""

import os
from itertools import product

import numpy as np
import pytest

from runtime.devices.host_memory import HostPages
from runtime.messages.transfer import PageLayout
from runtime.transfer.checksum import checksum
from runtime.transfer.layout import RankPages, mismatch, split

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
    page = memoryview(b"".join(sender.page(1).views))
    assert len(page) == sender.layout.page_bytes == 2 * LAYERS * TOKENS * HEADS * DIM
    assert checksum(sender.page(1).parts) == checksum(split(page, sender.layout))
    receiver.write(2, page, sender.layout)
    assert content(receiver, 2) == content(expected, 2)
    if theirs == own:
        for target, source in zip(receiver.page(1).parts, split(page, sender.layout), strict=True):
            target[:] = source
        receiver.copy([1])
        assert content(receiver, 1) == content(expected, 2)


def test_what_does_not_fit_is_refused() -> None:
    one = ranks(1, 1, "page_first").layout
    assert "tokens" in str(mismatch(PageLayout(8, one.num_ranks, one.parts), one))
    assert "sizes" in str(mismatch(PageLayout(TOKENS, 2, one.parts), one))
    assert "sizes" in str(mismatch(PageLayout(TOKENS, 1, (one.parts[0][:-1],)), one))
    assert "recurrent" in str(mismatch(PageLayout(TOKENS, 1, one.parts, (8,)), one))


def test_checksums_see_what_breaks() -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * 4096 + 100, dtype=np.uint8).tobytes()
    whole = checksum([memoryview(data)])
    for at in (0, 5000, 3 * 4096 - 1, len(data) - 1):
        broken = bytearray(data)
        broken[at] ^= 1
        assert checksum([memoryview(broken)]) != whole
    assert checksum([memoryview(data[4096:8192] + data[:4096] + data[8192:])]) != whole
    assert checksum([memoryview(data[:-1])]) != whole
