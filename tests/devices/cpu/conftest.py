"""Several ranks on the cpu device."""

from collections.abc import Iterator

import pytest

from tests.devices.cpu.ranks import RankProcesses, RunRanks


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[RunRanks]:
    processes = RankProcesses()
    yield processes.run
    processes.close()
