"""What the runtime says of itself."""

from typing import Any

import pytest

from runtime.service import Load

FULL: dict[str, Any] = {"total_pages": 100, "page_size": 10, "max_running": 20}


@pytest.mark.parametrize(
    ("load", "times"),
    [
        (Load(page_size=10), 0.0),  # nothing is known yet
        (Load(**FULL), 0.0),
        (Load(**FULL, used_pages=90, cached_pages=90), 0.0),  # what is only cached is given up
        (Load(**FULL, used_pages=60, cached_pages=10), 0.5),
        (Load(**FULL, used_pages=100, waiting_tokens=500, running=5, waiting=1), 1.5),
        (Load(**FULL, used_pages=10, running=20, waiting=20), 2.0),  # short requests, too many of them
    ],
)
def test_demand(load: Load, times: float) -> None:
    assert load.demand == times
