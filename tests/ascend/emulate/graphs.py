"""Captured graphs: what a capture records, and both protocols that change a recorded call before a replay.

The real torch_npu runs its own capture, replay and update code on the simulated runtime; these functions
stand around it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from torch import Tensor

from tests.ascend.emulate import queue
from tests.ascend.emulate.memory import leaves
from tests.ascend.emulate.table import need


@dataclass
class Call:
    """A recorded operator: how to compute it, and where in the device's memory its results belong (None: not
    there)."""

    name: str
    run: Callable[[], Any]
    fresh: tuple[Tensor | None, ...]
    replays: int = 0  # that were launched and have not come here yet

    def execute(self) -> None:
        """Computes the operator and writes its results."""
        self.replays = max(0, self.replays - 1)
        found = [leaf for leaf in leaves(self.run(), []) if isinstance(leaf, Tensor)]
        for to, made in zip(self.fresh, found, strict=False):
            if to is not None:
                to.copy_(made)


@dataclass
class _State:
    calls: list[Call] | None = None  # of the capture that is open
    group: int | None = None  # the first call of the task group that is open
    update: Call | None = None  # the call that the next operator replaces, in the order of this stream:
    update_stream: Any = None


_state = _State()
# id of a handle -> the handle, which keeps the id its own, and the call
_groups: dict[int, tuple[Any, Call]] = {}


def capturing() -> list[Call] | None:
    """The calls of the capture of this thread; None: there is none."""
    return _state.calls


def record(call: Call) -> None:
    """Adds a call to the capture."""
    assert _state.calls is not None
    _state.calls.append(call)


def updating() -> Call | None:
    """The call that is being updated; None: there is none."""
    return _state.update


def update(name: str, run: Callable[[], Any]) -> None:
    """The replays to come run this in place of what was captured."""
    call = _state.update
    assert call is not None
    need(call.name == name, f"an update of {call.name} by {name}")

    def replace() -> None:
        call.run = run

    if queue.is_lazy():
        queue.enqueue(replace, _state.update_stream)
        # of earlier lengths: this must not reach them, so it comes as early as the program allows
        if call.replays:
            queue.advance(_state.update_stream)
    else:
        replace()


def install() -> None:
    """Wraps torch_npu's graphs and task groups."""
    module = torch_npu.npu.graphs
    _wrap_graph(module.NPUGraph)
    _wrap_groups(module)


def _wrap_graph(graph_type: Any) -> None:
    begin, end, replay = graph_type.capture_begin, graph_type.capture_end, graph_type.replay

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        _state.calls = []

    def capture_end(graph: Any) -> None:
        graph.calls, _state.calls, _state.group = _state.calls, None, None
        end(graph)

    def replay_calls(graph: Any) -> None:
        replay(graph)
        for call in graph.calls:
            if queue.is_lazy():
                call.replays += 1
                queue.enqueue(call.execute)
            else:
                with torch.inference_mode():
                    call.execute()

    graph_type.capture_begin, graph_type.capture_end, graph_type.replay = (
        capture_begin,
        capture_end,
        replay_calls,
    )


def _wrap_groups(module: Any) -> None:
    group_begin, group_end = module.graph_task_group_begin, module.graph_task_group_end
    update_begin, update_end = module.graph_task_update_begin, module.graph_task_update_end

    def begin(stream: Any) -> None:
        group_begin(stream)
        assert _state.calls is not None
        _state.group = len(_state.calls)

    def end(stream: Any) -> Any:
        handle = group_end(stream)
        assert _state.calls is not None and _state.group is not None
        need(len(_state.calls) == _state.group + 1, "a task group holds one operator here")
        _groups[id(handle)] = (handle, _state.calls[_state.group])
        return handle

    def start_update(stream: Any, handle: Any) -> None:
        update_begin(stream, handle)
        _state.update, _state.update_stream = _groups[id(handle)][1], stream

    def stop_update(stream: Any) -> None:
        _state.update = None
        update_end(stream)

    for name, function in (
        ("graph_task_group_begin", begin),
        ("graph_task_group_end", end),
        ("graph_task_update_begin", start_update),
        ("graph_task_update_end", stop_update),
    ):
        setattr(module, name, function)
        setattr(torch.npu, name, function)
