"""The tasks of stored objects: batches, background responses, and what writes responses to disk.

Whatever such a task raises ends that one object, with a line in the log, and is counted
(runtime_stored_object_failures_total). Other objects, and the server, go on.
"""

from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct

from runtime import log
from runtime.metrics import Metrics

Kind = Literal["batch", "response", "response_writer", "uploads"]
Work = Callable[[], Awaitable[None]]


class StoredTask(Struct, frozen=True):
    """The work of one stored object, and how the object ends when the work raises."""

    kind: Kind
    object_id: str
    work: Work
    fail: Work


class StoredTasks:
    """Supervises the tasks of stored objects. `run` runs them; those that are started before wait for it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: list[StoredTask] = []
        self._group: TaskGroup | None = None

    @property
    def is_running(self) -> bool:
        """Whether tasks that are started now run now."""
        return self._group is not None

    def start(self, task: StoredTask) -> None:
        """Starts a task."""
        if self._group is None:
            self._waiting.append(task)
        else:
            self._group.start_soon(self._supervise, task)

    async def run(self) -> None:
        """Runs tasks until cancelled."""
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                waiting, self._waiting = self._waiting, []
                for task in waiting:
                    self.start(task)
                await anyio.sleep_forever()
        finally:
            self._group = None

    async def _supervise(self, task: StoredTask) -> None:
        try:
            await task.work()
        except Exception:
            self._report(task, "the task of a stored object failed; the object ends with an error")
            try:
                await task.fail()
            except Exception:
                self._report(task, "a stored object whose task failed could not be ended")

    def _report(self, task: StoredTask, event: str) -> None:
        self._metrics.stored_object_failures[task.kind] += 1
        log.get("stored").exception(event, kind=task.kind, id=task.object_id, exc_info=True)
