"""Arrays that travel to the device together."""

import numpy as np
import pytest
import torch

from runtime.layers.upload import ALIGNED, PackedUpload


def test_all_arrays_travel_in_one_copy() -> None:
    """Arrays of any dtypes and shapes arrive at addresses that kernels are compiled for."""
    upload, given = PackedUpload(torch.device("cpu")), np.arange(5, dtype=np.int32)
    given.flags.writeable = False
    arrays = [given, np.ones((2, 3), np.float32), np.empty((0, 4), np.int64), np.array([0.1, 0.2])]
    sent = [upload.add(array) for array in arrays] + [upload.int64(given), upload.int64(given > 2)]
    wanted = [*arrays, given, given > 2]
    for one, array in zip(sent, wanted, strict=True):
        assert np.array_equal(one.tensor.numpy(), array) and one.tensor.shape == array.shape
        assert one.tensor.data_ptr() % ALIGNED == 0
    assert [one.tensor.dtype for one in sent[-2:]] == [torch.int64] * 2 and upload.num_copies == 1


def test_what_comes_later_travels_apart() -> None:
    upload, order = PackedUpload(torch.device("cpu")), list[str]()
    first = upload.add(np.array([3]))
    upload.then(lambda: order.append(f"behind {first.tensor.item()}"))
    assert order == []
    upload.send()
    later = upload.add(np.array([4]))
    upload.then(lambda: order.append("last"))
    assert later.tensor.item() == 4 and order == ["behind 3", "last"] and upload.num_copies == 2
    upload.send()
    assert upload.num_copies == 2, "nothing is left"


def test_memory_of_a_device_is_reached_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for one: the buffer is pinned, and the host waits for no copy."""
    asked, empty = list[bool](), torch.empty

    def pinned(*shape: int, pin_memory: bool, dtype: torch.dtype) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*shape, dtype=dtype)

    upload = PackedUpload(torch.device("meta"))
    monkeypatch.setattr(torch, "empty", pinned)
    one, other = upload.int64(np.arange(3)), upload.add(np.ones(2, np.float32))
    assert one.tensor.device.type == "meta" and other.tensor.shape == (2,) and asked == [True]


def test_arrays_of_nothing_travel() -> None:
    upload = PackedUpload(torch.device("cpu"))
    nothing = upload.int64(np.empty(0, np.int32))
    assert nothing.tensor.shape == (0,) and nothing.tensor.dtype == torch.int64
