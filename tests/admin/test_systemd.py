"""A service manager learns when the server is ready, drains, and that its event loop runs."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from runtime.admin.systemd import Notifier
from runtime.service import Health

pytestmark = pytest.mark.anyio


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


async def test_the_states_of_a_server(manager: socket.socket) -> None:
    states = iter([*["loading"] * 2, "ready", "recovering", "ready", "draining", "draining"])
    ended = anyio.Event()

    def health() -> Health:
        state = next(states, None)
        if state is None:
            ended.set()
            return Health("draining")
        return Health(state)

    environment = {
        "NOTIFY_SOCKET": manager.getsockname(),
        "WATCHDOG_USEC": "20000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    notifier = Notifier.from_environment(environment)
    assert notifier is not None and notifier.interval_s == 0.01
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(notifier.follow, health)
        await ended.wait()
        tasks.cancel_scope.cancel()
    received = [manager.recv(4096).decode().split("\n") for _ in range(7)]
    loading = "EXTEND_TIMEOUT_USEC=30000000"
    assert received == [
        ["STATUS=loading", loading, "WATCHDOG=1"],
        [loading, "WATCHDOG=1"],
        ["STATUS=ready", "READY=1", "WATCHDOG=1"],
        ["STATUS=recovering", "WATCHDOG=1"],
        ["STATUS=ready", "WATCHDOG=1"],
        ["STATUS=draining", "STOPPING=1", "WATCHDOG=1"],
        ["WATCHDOG=1"],
    ]


@pytest.mark.parametrize(
    ("environment", "interval_s"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": "tcp:1"}, None),
        ({"NOTIFY_SOCKET": "@abstract"}, 1.0),
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1000000"}, 0.5),
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, 1.0),
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "soon"}, 1.0),
    ],
)
def test_what_the_environment_says(environment: dict[str, str], interval_s: float | None) -> None:
    notifier = Notifier.from_environment(environment)
    assert (notifier and notifier.interval_s) == interval_s


def test_a_manager_that_is_gone_is_ignored(tmp_path: Path) -> None:
    Notifier(str(tmp_path / "gone")).send("READY=1")
