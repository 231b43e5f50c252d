"""Decode steps as NPUGraphs, with lengths that the host gives to each replay.

The attention operator takes lengths from the host, so they are part of a captured launch. torch_npu gives
each captured call of it a task group behind an event from outside (`auto_dispatch_capture`), and
`NPUGraph.update` puts the same call with other lengths in its place, on a stream of updates. That is the
choice here, before groups made by hand: torch_npu knows the workspaces and outputs of its operators, also of
those to come, and what is left to us is the order:

    updates     u1 u2 u3 ...            u1 u2 u3 ...         each call's event is recorded behind its update
    replays         [ a1 a2 a3 ... ]         [ a1 a2 a3 ]    each call waits for its event, then resets it
                                   ^done─────^               updates begin when the replay before is done

Without the wait for `done`, which the device does and not the host, the update of the next step would reach a
call that has yet to run, or the reset of one step would swallow the event of the next. Lengths are a new list
each time, so nothing that a launch may still read is written.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.devices.ascend.attention import AttentionPlan, Singles


@dataclass(frozen=True, slots=True)
class Recorded:
    """One graph, and what its attention calls see."""

    graph: Any
    calls: list[tuple[str, int]]  # of attention, in order: the argument that has the lengths, and the window
    done: Any  # the event behind its last replay


class AscendGraphs:
    """Graphs of one NPU. See devices/base.py."""

    def __init__(self, triangle: Tensor) -> None:
        """`triangle`: the mask of attention plans."""
        self.triangle = triangle
        # the graph whose pool all others share; a pool dies with the last of its graphs
        self.first: Any = None
        self.stream = torch.npu.Stream()
        self.page_size = 0
        self.called: list[tuple[str, int]] = []  # the attention calls since the last plan

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> AttentionPlan:
        """All rows are single ones. The lengths that the host gives here are the longest, so workspaces last
        for all."""
        self.page_size, self.called = page_size, []
        singles = {
            window: _singles(slots, lengths, page_tables[-1 if window else 0], page_size, window)
            for window in windows
        }
        return AttentionPlan(page_size, self.triangle, singles, {}, self.called)

    def capture(self, body: Callable[[], None]) -> Recorded:
        graph = torch.npu.NPUGraph()
        graph.auto_dispatch_capture = True
        self.called = []
        torch.npu.synchronize()
        try:
            with _without_collection(), torch.npu.stream(self.stream), graph.graph_dispatch_mode:
                # only what this thread does is captured: another one waits for the results of steps meanwhile
                graph.capture_begin(
                    pool=None if self.first is None else self.first.pool(), capture_error_mode="thread_local"
                )
                try:
                    body()
                finally:
                    graph.capture_end()
        except BaseException:
            self.stream = torch.npu.Stream()  # the old one may be left within a capture
            raise
        self.first = self.first or graph
        done = torch.npu.Event()
        done.record()
        return Recorded(graph, self.called, done)

    def forget(self) -> None:
        self.first = None

    def replay(self, graph: Recorded, lengths: np.ndarray | tuple[()]) -> None:
        if graph.calls:
            graph.graph.graph_dispatch_mode.update_stream.wait_event(graph.done)
            updates = {call: {call[0]: self._seen(lengths, call[1])} for call in set(graph.calls)}
            graph.graph.update([updates[call] for call in graph.calls])
        graph.graph.replay()
        if graph.calls:
            graph.done.record()

    def _seen(self, lengths: Any, window: int) -> list[int]:
        return (
            lengths - _first_pages(lengths, window, self.page_size) * self.page_size if window else lengths
        ).tolist()


@contextmanager
def _without_collection() -> Iterator[None]:
    """What the garbage collector frees, such as another graph, may be what a capture forbids."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _first_pages(lengths: Any, window: int, page_size: int) -> Any:
    """Of each row, the page of the oldest key that it sees; of numpy's arrays or of tensors."""
    return (lengths - window).clip(0) // page_size


def _singles(slots: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, window: int) -> Singles:
    """A row sees all of its page table, or as many pages as a window can touch, and the part that it does not
    see is masked."""
    rows = page_table.index_select(0, slots)
    if not window:
        return Singles(slice(0, len(slots)), rows, [rows.shape[1] * page_size] * len(slots), None)
    width = min((window - 2) // page_size + 2, rows.shape[1])
    first = _first_pages(lengths, window, page_size).unsqueeze(1)
    columns = (first + torch.arange(width, device=rows.device)).clamp(max=rows.shape[1] - 1)
    keys = torch.arange(width * page_size, device=rows.device)
    is_out = keys < (lengths - window).unsqueeze(1) - first * page_size
    return Singles(
        slice(0, len(slots)), rows.gather(1, columns), [width * page_size] * len(slots), is_out[:, None, None]
    )
