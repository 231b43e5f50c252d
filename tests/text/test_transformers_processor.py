"""The process of transformers' processor: what it does not open or take, and when it ends."""

from pathlib import Path

import numpy as np
import pytest

from runtime.errors import InternalFault, InvalidRequest
from runtime.messages.media import Media, MediaKind
from runtime.messages.packed_arrays import pack, unpack
from runtime.text.transformers_processor import TransformersProcessor

IMAGE = Media(kind=MediaKind.IMAGE, param="images[0]", digest=b"", values=np.zeros((1, 4, 4, 3), np.uint8))


def test_arrays_come_back_as_they_were() -> None:
    arrays = {
        "pixels": np.arange(6, dtype=np.float32).reshape(1, 2, 3),
        "mask": np.array([True, False, True]),
        "sizes": np.array([[3, 4]]),
        "none": np.empty((0, 2), np.float32),
    }
    packed = pack(arrays)
    assert len(packed) % 8 == 0
    found = unpack(np.frombuffer(packed, np.float32))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_what_goes_wrong_names_the_file(tmp_path: Path) -> None:
    """A folder without a processor; a process that was killed, after which another one starts."""
    kinds = {MediaKind.IMAGE: "<image>"}
    processor = TransformersProcessor(tmp_path, kinds, {MediaKind.IMAGE: 1})
    video = Media(kind=MediaKind.VIDEO, param="videos[0]", digest=b"", values=IMAGE.values)
    with pytest.raises(InvalidRequest, match=r"videos\[0\]: this model takes images"):
        processor.prepare(video)
    try:
        for _ in range(2):
            with pytest.raises(InternalFault, match="processor of the model does not open"):
                processor.prepare(IMAGE)
            assert processor._process is not None
            processor._process.kill()
            processor._process.wait()
    finally:
        processor.close()
    assert processor._process is None
