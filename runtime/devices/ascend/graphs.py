"""Captured steps as NPUGraphs, with lengths that the host gives to each replay.

The attention operator takes lengths from the host, so they are part of a captured launch. torch_npu puts each
captured call of it into a task group that waits for an external event (`auto_dispatch_capture`), and
`NPUGraph.update` replaces the call by one with other lengths, on a stream of updates. This is used instead of
task groups made by hand because torch_npu knows the workspaces and outputs of its operators. What is left to
do is the order:

    updates     u1 u2 u3 ...            u1 u2 u3 ...         each call's event is recorded after its update
    replays         [ a1 a2 a3 ... ]         [ a1 a2 a3 ]    each call waits for its event, then resets it
                                   ^done─────^               updates begin when the replay before is done

Without the wait for `done`, which the device does and not the host, the update of the next step could reach a
call that has not run yet, or the reset of one step could clear the event of the next. Lengths are a new list
each time, so no list that a launch may still read is changed.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from runtime.devices.ascend.attention import AttentionPlan, DecodeRows
from runtime.devices.ascend.sparse_plan import SparsePlan, plan_sparse_decodes
from runtime.devices.streams import Stream

Lengths = TypeVar("Lengths", np.ndarray, Tensor)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A captured step, with its attention calls."""

    graph: torch.npu.NPUGraph
    lengths_args: list[
        tuple[str, int]
    ]  # of each attention call: its argument with the lengths, and its window
    done: torch.npu.Event  # the event after its last replay


class AscendGraphs:
    """Graphs (devices/base.py) of one NPU."""

    def __init__(self, triangle: Tensor, *, is_sparse: bool = False) -> None:
        """`triangle`: the mask of attention.triangle. `is_sparse`: as of AscendOps."""
        self.triangle = triangle
        self.is_sparse = is_sparse
        self.reads_lengths = not is_sparse  # that attention has them on the device
        # the graph whose memory pool all others share; a pool is freed with the last of its graphs
        self.first: torch.npu.NPUGraph | None = None
        self.stream = torch.npu.Stream()
        self.page_size = 0
        self.lengths_args: list[tuple[str, int]] = []  # attention calls since the last plan

    def plan_decodes(
        self, slots: Tensor, lengths: Tensor, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> AttentionPlan | SparsePlan:
        """The plan of captured decode rows; see Graphs.plan_decodes. The lengths given to the operator here
        are the largest, so its workspaces suffice for all replays."""
        self.page_size, self.lengths_args = page_size, []
        if self.is_sparse:
            return plan_sparse_decodes(slots, lengths, page_tables[0], page_size)
        decodes = {
            window: _decode_rows(slots, lengths, page_tables[-1 if window else 0], page_size, window)
            for window in windows
        }
        return AttentionPlan(page_size, self.triangle, decodes, {}, self.lengths_args)

    def capture(self, body: Callable[[], None], stream: Stream | None = None) -> CapturedGraph:
        """Captures what `body` launches; see Graphs.capture."""
        graph = torch.npu.NPUGraph()
        graph.auto_dispatch_capture = True
        self.lengths_args = []
        torch.npu.synchronize()
        try:
            with _without_gc(), torch.npu.stream(stream or self.stream), graph.graph_dispatch_mode:
                # other threads are not captured: one waits for the results of earlier steps meanwhile
                graph.capture_begin(
                    pool=None if self.first is None else self.first.pool(), capture_error_mode="thread_local"
                )
                try:
                    body()
                finally:
                    graph.capture_end()
        except BaseException:
            self.stream = torch.npu.Stream()  # the old one may still be capturing
            raise
        self.first = self.first or graph
        done = torch.npu.Event()
        done.record()
        return CapturedGraph(graph, self.lengths_args, done)

    def forget(self) -> None:
        """Gives up the shared memory pool."""
        self.first = None

    def replay(self, graph: CapturedGraph, lengths: np.ndarray | tuple[()]) -> None:
        """Updates the lengths of the attention calls and launches the step again."""
        if graph.lengths_args:
            graph.graph.graph_dispatch_mode.update_stream.wait_event(graph.done)
            updates = {
                call: {call[0]: self._kv_lengths(np.asarray(lengths), call[1])}
                for call in set(graph.lengths_args)
            }
            graph.graph.update([updates[call] for call in graph.lengths_args])
        graph.graph.replay()
        if graph.lengths_args:
            graph.done.record()

    def _kv_lengths(self, lengths: np.ndarray, window: int) -> list[int]:
        return (
            lengths - _first_pages(lengths, window, self.page_size) * self.page_size if window else lengths
        ).tolist()


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disables garbage collection, which may free what must not be freed during a capture, such as a
    graph."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _first_pages(lengths: Lengths, window: int, page_size: int) -> Lengths:
    """The page of the oldest key that each row sees."""
    return (lengths - window).clip(0) // page_size


def _decode_rows(
    slots: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, window: int
) -> DecodeRows:
    """Decode rows that see all of their page table, or with a window as many pages as it can touch,
    masked."""
    rows = page_table.index_select(0, slots)
    if not window:
        return DecodeRows(slice(0, len(slots)), rows, [rows.shape[1] * page_size] * len(slots), None)
    width = min((window - 2) // page_size + 2, rows.shape[1])
    first = _first_pages(lengths, window, page_size).unsqueeze(1)
    columns = (first + torch.arange(width, device=rows.device)).clamp(max=rows.shape[1] - 1)
    keys = torch.arange(width * page_size, device=rows.device)
    is_masked = keys < (lengths - window).unsqueeze(1) - first * page_size
    return DecodeRows(
        slice(0, len(slots)),
        rows.gather(1, columns),
        [width * page_size] * len(slots),
        is_masked[:, None, None],
    )
