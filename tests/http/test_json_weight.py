"""JSON bodies are weighed before they are decoded."""

import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import TooLarge
from runtime.http import json_weight
from runtime.http.cut_body import MIN_BYTES
from runtime.http.json_weight import UNWEIGHED_BYTES, check_weight, joined_body, weight_of

pytestmark = pytest.mark.anyio

JSON = st.recursive(
    st.none() | st.integers() | st.text('ab\\",:[]{}é', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a\\",:{', max_size=4), inner),
    max_leaves=30,
)


def slow_weight(value: Any) -> int:
    """The weight by counting values one by one."""
    match value:
        case str():
            return 3
        case list():
            return 4 + max(len(value) - 1, 0) + sum(map(slow_weight, value))
        case dict():
            return 4 + max(len(value) - 1, 0) + sum(3 + 2 + slow_weight(one) for one in value.values())
    return 0


@given(JSON, st.booleans())
def test_what_stands_in_strings_weighs_nothing(value: Any, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    whole = weight_of(body)
    assert whole == slow_weight(value)
    before = json_weight.BLOCK_BYTES
    try:
        for json_weight.BLOCK_BYTES in (1, 2, 3, 7):
            assert weight_of(body) == whole
    finally:
        json_weight.BLOCK_BYTES = before


@pytest.mark.parametrize(
    "piece, is_taken",
    [
        ('"Some text, with: [and] {so on}, as long as texts are where they are many. \\" "', True),
        ("1234567890123456", True),
        ("[]", False),
        ('"a"', False),
    ],
)
async def test_many_values_are_refused_and_much_text_is_not(piece: str, is_taken: bool) -> None:
    most = json_weight.BYTES_PER_UNIT * json_weight.MIN_WEIGHT
    body = f"[{','.join([piece] * (most // (len(piece) + 1) - 1))}]".encode()
    if is_taken:
        await check_weight(body, most)
    else:
        with pytest.raises(TooLarge, match="--max-body-bytes"):
            await check_weight(body, most)


@pytest.mark.parametrize(
    "size, is_aside", [(UNWEIGHED_BYTES, False), (UNWEIGHED_BYTES + 1, True), (2 * MIN_BYTES, True)]
)
async def test_large_bodies_are_joined_in_a_worker_thread(
    size: int, is_aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory of megabytes takes the event loop longer than their bytes; the parts are given up there."""
    parts = [b" " * (size // 2), b" " * (size - size // 2)]
    weighed_in: list[int] = []

    def weigh(body: bytes) -> int:
        assert len(body) == size and not parts
        weighed_in.append(threading.get_ident())
        return 0

    monkeypatch.setattr(json_weight, "weight_of", weigh)
    assert (await joined_body(parts, 2**20)).whole == b" " * size
    assert bool(weighed_in) == is_aside and threading.get_ident() not in weighed_in
