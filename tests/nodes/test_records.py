"""Records: whole messages come through in order, and nothing that was done to them on the way."""

import random

import pytest

from runtime.errors import LinkError
from runtime.nodes import records
from runtime.nodes.records import MAX_RECORD_BYTES, Opener, Sealer

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.mark.parametrize("size", [0, 1, 1000, MAX_RECORD_BYTES, MAX_RECORD_BYTES + 1, 3 * MAX_RECORD_BYTES])
def test_messages_come_through(size: int) -> None:
    message = random.Random(size).randbytes(size)
    assert Opener(KEY).open(bytearray(Sealer(KEY).seal(message))) == [message]


def test_any_parts_of_the_stream_do() -> None:
    sealer, opener, choice = Sealer(KEY), Opener(KEY), random.Random(0)
    messages = [choice.randbytes(choice.randrange(300)) for _ in range(50)]
    stream = b"".join(map(sealer.seal, messages))
    found, buffer = [], bytearray()
    while stream:
        count = choice.randrange(1, 100)
        buffer += stream[:count]
        stream = stream[count:]
        found += opener.open(buffer)
    assert found == messages and not buffer


@pytest.mark.parametrize("at", range(0, 41, 4))
def test_a_changed_byte_is_noticed(at: int) -> None:
    stream = bytearray(Sealer(KEY).seal(b"a message of 20 byte"))
    assert len(stream) == 41
    stream[at] ^= 1
    with pytest.raises(LinkError):
        Opener(KEY).open(stream + bytes(MAX_RECORD_BYTES))


def test_repeated_missing_swapped_and_foreign_records_are_noticed() -> None:
    sealer = Sealer(KEY)
    one, two = sealer.seal(b"one"), sealer.seal(b"two")
    for stream in (one + one, two, two + one, Sealer(OTHER).seal(b"one")):
        with pytest.raises(LinkError, match="not authentic"):
            Opener(KEY).open(bytearray(stream))


def test_a_length_that_no_record_has_is_refused_before_it_is_waited_for() -> None:
    with pytest.raises(LinkError, match="is none of this protocol"):
        Opener(KEY).open(bytearray((MAX_RECORD_BYTES + 1).to_bytes(4, "big") + b"\0"))
    with pytest.raises(LinkError, match="kind 7"):
        Opener(KEY).open(bytearray(b"\0\0\0\1\7"))


def test_messages_have_a_limit_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = bytearray(Sealer(KEY).seal(bytes(3 * MAX_RECORD_BYTES)))
    monkeypatch.setattr(records, "MAX_MESSAGE_BYTES", 2 * MAX_RECORD_BYTES)
    with pytest.raises(LinkError, match="above the limit"):
        Sealer(KEY).seal(bytes(3 * MAX_RECORD_BYTES))
    with pytest.raises(LinkError, match="more than"):
        Opener(KEY).open(stream)
