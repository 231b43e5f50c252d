"""`runtime check doctor --bench`: a process a rank, through the device's own operators."""

import pytest

from runtime.cli.doctor.bench import bench
from runtime.errors import StartError


def test_two_ranks_are_measured() -> None:
    found = bench("cpu", 2, {"OMP_NUM_THREADS": "1"})
    assert (found.device, found.dtype, found.ranks) == ("cpu", "float32", 2)
    assert [figure.name for figure in found.figures][-1] == "all_reduce of 512 tokens"
    assert len({figure.name for figure in found.figures}) == len(found.figures) == 8
    assert all(figure.value > 0 for figure in found.figures)


@pytest.mark.parametrize(("device", "message"), [("null", "computes nothing"), ("no-such", "is unknown")])
def test_what_cannot_be_measured_says_why(device: str, message: str) -> None:
    with pytest.raises(StartError, match=message):
        bench(device, 1, {})
