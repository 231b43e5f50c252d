"""Messages through the wire: what comes out is what went in, and bytes that no encoder made are refused."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import RingError
from runtime.messages.codec import KINDS, Wire
from runtime.messages.media import Encode, MediaValues
from runtime.messages.ranks import FromRank, LoadProgress, RankFailed, RankReady, StartRank, StopRank, ToRank
from runtime.messages.steps import Admit, PromptLogprobs, SlotSampling, StepPlan, StepResult


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


SAMPLING = SlotSampling(
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    seed=-(2**63),
    bias_ids=[3],
    bias_values=[1.5],
    stop_ids=[2],
    min_len=4,
    top_logprobs=-1,
    prompt_logprobs=-1,
)
START = StartRank(
    device="null",
    model_path="/m",
    dtype="auto",
    load_format="auto",
    tp_size=2,
    page_size=16,
    max_slots=4,
    max_len=64,
    max_step_tokens=64,
    memory_fraction=0.5,
    max_total_tokens=None,
    num_threads=1,
    rendezvous="r",
    seed=1,
    device_options={"step_s": 0.5, "script": [1, 2]},
)
PLAN = StepPlan(
    step=7,
    num_decodes=1,
    admits=[Admit(0, SAMPLING, 3, ints(1, 2, 3)), Admit(1, SAMPLING, 1, ints())],
    slots=ints(0, 1),
    counts=ints(1, 3),
    samples=np.array([1, 0], np.uint8),
    token_ids=ints(4, 5, 6),
    page_slots=ints(1),
    page_rows=ints(0),
    page_ids=ints(9),
)
RESULT = StepResult(
    7,
    ints(11),
    2,
    np.array([-0.5], np.float32),
    ints(1, 2),
    np.array([-0.1, np.nan], np.float32),
    [PromptLogprobs(1, 0, np.array([-1.0], np.float32), ints(), np.array([], np.float32))],
    0.25,
)

TO_RANK = [START, PLAN, StopRank()]
FROM_RANK = [
    LoadProgress(0, "weights", 5, 10),
    RankReady(
        rank=0, num_pages=3, weights_bytes=1, pages_bytes=2, device_name="null", phases_s={"load": 0.5}
    ),
    RankFailed(1, "no", True),
    RESULT,
]


def plain(value: Any) -> Any:
    """Messages with arrays as (dtype, values), so that they can be compared; nan is equal to itself."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), [repr(item) for item in value.tolist()])
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, [plain(getattr(value, name)) for name in value.__struct_fields__])
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "union,message",
    [(ToRank, m) for m in TO_RANK] + [(FromRank, m) for m in FROM_RANK],
    ids=lambda value: type(value).__name__,
)
def test_a_message_comes_out_as_it_went_in(union: Any, message: Any) -> None:
    body = Wire[Any](union).encode(message)
    assert plain(Wire[Any](union).decode(body)) == plain(message)
    assert b"".join(Wire[Any](union).encode_parts(message)) == body


def test_parts_of_arrays_are_no_copies() -> None:
    values = np.arange(6, dtype=np.float32)
    media = MediaValues(id=1, values=values, shape=(2, 3), grid=(1, 1, 1), num_rows=1)
    parts = Wire[ToRank](ToRank).encode_parts(Encode(dropped=[], media=[media]))
    assert any(np.shares_memory(values, np.frombuffer(part, np.uint8)) for part in parts if len(part))


def test_one_wire_takes_many_messages() -> None:
    wire = Wire[Any](ToRank)
    for message in TO_RANK + TO_RANK:
        assert plain(wire.decode(wire.encode(message))) == plain(message)


class Holder(msgspec.Struct, array_like=True):
    array: np.ndarray
    other: np.ndarray


@given(st.sampled_from(KINDS), st.lists(st.integers(0, 100), max_size=40), st.sampled_from(KINDS))
def test_arrays_of_every_kind_are_aligned(
    dtype: np.dtype[Any], values: list[int], other: np.dtype[Any]
) -> None:
    wire = Wire[Holder](Holder)
    decoded = wire.decode(bytearray(wire.encode(Holder(np.array(values, dtype), np.array([1], other)))))
    assert decoded.array.dtype == dtype and decoded.array.tolist() == values
    assert decoded.other.dtype == other and decoded.other.tolist() == [1]
    assert decoded.array.flags.aligned and decoded.other.flags.aligned and decoded.other.flags.writeable


def test_a_strided_array_is_sent_by_its_values() -> None:
    wire = Wire[Holder](Holder)
    assert wire.decode(wire.encode(Holder(np.arange(10, dtype=np.int32)[::3], ints()))).array.tolist() == [
        0,
        3,
        6,
        9,
    ]


def test_arrays_are_views_of_the_body() -> None:
    wire = Wire[Holder](Holder)
    body = bytearray(wire.encode(Holder(ints(1, 2), ints(3))))
    decoded = wire.decode(body)
    body[-8:-4] = (77).to_bytes(4, "little")
    assert decoded.other.tolist() == [77]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 2), np.int32),
        np.array(["text"]),
        np.array([1j]),
        np.array([None]),
        object(),
        np.zeros(2, ">i4"),
    ],
    ids=["2-d", "text", "complex", "objects", "no array", "big endian"],
)
def test_what_cannot_be_sent_is_refused(array: Any) -> None:
    with pytest.raises(RingError, match="cannot hold"):
        Wire[Holder](Holder).encode(Holder(array, ints()))


def with_header(header: Any, arrays: bytes = b"") -> bytes:
    packed = msgspec.msgpack.encode(header)
    body = len(packed).to_bytes(4, "little") + packed
    return body + bytes(-len(body) % 8) + arrays


@pytest.mark.parametrize(
    "body,message",
    [
        (b"", "too short"),
        (b"\xff\xff\xff\xff", "ends at byte"),
        (with_header([1 << 4, 0]), "an array ends"),
        (with_header([2**50 << 4, 0]), "an array ends"),
        (with_header([0, 0], bytes(8)), "arrays end at byte"),
        (with_header([15, 0]), "kind 15"),
        (with_header([-1, 0]), "no array"),
        (with_header([True, 0]), "no array"),
        (with_header([None, 0]), "not valid"),
        (with_header([0]), "not valid"),
        (with_header({"array": 0}), "not valid"),
        (b"\1\0\0\0\xc1\0\0\0", "not valid"),
    ],
    ids=range(12),
)
def test_bytes_that_no_encoder_made_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(RingError, match=message):
        Wire[Holder](Holder).decode(body)


@pytest.mark.parametrize("union,message", [(ToRank, PLAN), (FromRank, RESULT)], ids=["plan", "result"])
def test_every_truncation_is_refused(union: Any, message: Any) -> None:
    wire = Wire[Any](union)
    body = wire.encode(message)
    for size in range(len(body)):
        with pytest.raises(RingError):
            wire.decode(body[:size])
    with pytest.raises(RingError):
        wire.decode(body + bytes(8))
    assert plain(wire.decode(body)) == plain(message)


def decodes_or_refuses(wire: Wire[Any], body: bytes) -> None:
    try:
        wire.decode(body)
    except RingError:
        return


@given(st.binary(max_size=200), st.sampled_from([ToRank, FromRank]))
def test_random_bytes_raise_nothing_else(body: bytes, union: Any) -> None:
    decodes_or_refuses(Wire[Any](union), len(body).to_bytes(4, "little") + body)


@given(st.sampled_from(TO_RANK), st.data())
def test_changed_bytes_raise_nothing_else(message: Any, data: st.DataObject) -> None:
    wire = Wire[Any](ToRank)
    body = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(wire, bytes(body))


def test_nesting_beyond_the_decoders_depth_is_refused() -> None:
    packed = msgspec.msgpack.encode(msgspec.to_builtins(START))[:-1]
    options = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
    at = packed.index(b"\x82\xa6step_s")
    packed = packed[:at] + options
    body = len(packed).to_bytes(4, "little") + packed
    with pytest.raises(RingError):
        Wire[Any](ToRank).decode(body + bytes(-len(body) % 8))
