"""Which layers of computed pages are saved together, and of which of them a rank tells."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.messages.steps import PageCopies, StepPlan
from runtime.ranks.step_copies import LayerSaves

NONE = np.empty(0, np.int32)
LAYERS = [[100, 50], [100, 50, 10], [100, 50], [100, 50]]  # bytes of the parts of a page


class Copies:
    """Saves that are done at once."""

    def __init__(self) -> None:
        self.saved: list[range] = []

    def save_layers(
        self, layers: range, pages: np.ndarray, hosts: np.ndarray, done: Callable[[], None] | None
    ) -> None:
        assert pages.tolist() == [3, 4] and hosts.tolist() == [7, 8]
        self.saved.append(layers)
        if done is not None:
            done()


@pytest.mark.parametrize(
    ("notice_bytes", "has_result", "saved", "reported"),
    [
        (0, True, [range(4)], []),
        (0, False, [range(4)], []),
        (1, True, [range(1), range(1, 2), range(2, 3), range(3, 4)], [2, 5, 7]),
        (1, False, [range(1), range(1, 2), range(2, 3), range(3, 4)], [2, 5, 7, 9]),
        (620, True, [range(2), range(2, 4)], [5]),
        (621, True, [range(3), range(3, 4)], [7]),
        (10_000, True, [range(4)], []),
        (10_000, False, [range(4)], [9]),
    ],
)
def test_layers(notice_bytes: int, has_result: bool, saved: list[range], reported: list[int]) -> None:
    computed = np.array([3, 4], np.int32), np.array([7, 8], np.int32)
    plan = StepPlan(
        step=11,
        num_decodes=0,
        slots=NONE,
        counts=NONE,
        samples=np.empty(0, np.uint8),
        page_copies=PageCopies(NONE, NONE, NONE, NONE, *computed, notice_bytes),
    )
    copies, notices = Copies(), list[int]()

    def tell(step: int, num_parts: int) -> None:
        assert step == 11
        notices.append(num_parts)

    unused: Any = copies
    saves = LayerSaves(unused, plan, LAYERS, tell, has_result=has_result)
    for layer in range(len(LAYERS)):
        wants, count = saves.wants(layer), len(copies.saved)
        saves.stored(layer)
        assert wants == (len(copies.saved) > count)
    saves.end()
    assert copies.saved == saved and notices == reported
