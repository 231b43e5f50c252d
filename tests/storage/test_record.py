"""A record that differs in anything from what was written is not intact."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.storage.record import HEADER_BYTES, header, is_intact

IDENTITY, KEY = b"i" * 16, b"k" * 16


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


@given(page=st.binary(min_size=1, max_size=400), data=st.data())
def test_any_changed_byte_is_found(page: bytes, data: st.DataObject) -> None:
    record = bytes(header(IDENTITY, KEY, views(page))) + page
    place = data.draw(st.integers(0, len(record) - 1))
    damage = data.draw(st.integers(1, 255))
    changed = bytearray(record)
    changed[place] ^= damage
    assert is_intact(bytearray(record[:HEADER_BYTES]), IDENTITY, KEY, views(record[HEADER_BYTES:]))
    assert not is_intact(changed[:HEADER_BYTES], IDENTITY, KEY, views(bytes(changed[HEADER_BYTES:])))


@given(page=st.binary(min_size=1, max_size=400), cut=st.integers(0, 399))
def test_parts_may_be_cut_anywhere(page: bytes, cut: int) -> None:
    head = header(IDENTITY, KEY, views(page))
    assert is_intact(head, IDENTITY, KEY, views(page[:cut], page[cut:]))
    assert len(head) == HEADER_BYTES == 64


def test_other_pages_are_strangers() -> None:
    head = header(IDENTITY, KEY, views(b"page"))
    assert not is_intact(head, b"j" * 16, KEY, views(b"page"))
    assert not is_intact(head, IDENTITY, b"l" * 16, views(b"page"))
    assert not is_intact(head, IDENTITY, KEY, views(b"pag"))
