"""What a service manager is told: systemd's notification protocol (sd_notify(3)), for units of `Type=notify`.

READY=1        the model is loaded and requests are answered; until then the start may take its time
STATUS=...     the state as in /health, for `systemctl status`
WATCHDOG=1     twice in each WATCHDOG_USEC, from the event loop: a loop that is stuck is restarted
STOPPING=1     the server drains
"""

import os
import socket
from collections.abc import Callable, Mapping

import anyio

from runtime.service import Health

INTERVAL_S = 1.0  # between two looks at the state
EXTENSION_S = 30  # how long the start may last after each look


class Notifier:
    """Reports to the service manager that started this process."""

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        """`address`: a path, or `@NAME` for Linux's abstract namespace. `watchdog_s`: the manager restarts a
        service that is silent for longer."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.interval_s = INTERVAL_S if watchdog_s is None else min(INTERVAL_S, watchdog_s / 2)
        self._has_watchdog = watchdog_s is not None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Notifier | None":
        """For the socket that NOTIFY_SOCKET names; None without one. WATCHDOG_USEC counts if WATCHDOG_PID is
        this process, or absent."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return None
        pid, limit_us = environment.get("WATCHDOG_PID", ""), environment.get("WATCHDOG_USEC", "")
        is_watched = limit_us.isdecimal() and int(limit_us) > 0 and pid in ("", str(os.getpid()))
        return cls(address, int(limit_us) / 1e6 if is_watched else None)

    async def follow(self, health: Callable[[], Health]) -> None:
        """Reports the state of the server until it is cancelled."""
        reported: str | None = None
        while True:
            state = health().state
            lines = [] if state == reported else [f"STATUS={state}"]
            if state == "loading":
                lines.append(f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * 1e6)}")
            elif state == "draining":
                lines += ["STOPPING=1"] * (state != reported)
            elif reported in (None, "loading"):
                lines.append("READY=1")
            if self._has_watchdog:
                lines.append("WATCHDOG=1")
            self.send(*lines)
            reported = state
            await anyio.sleep(self.interval_s)

    def send(self, *lines: str) -> None:
        """Sends these lines as one datagram. A manager that does not listen is ignored."""
        if not lines:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as to_manager:
            try:
                to_manager.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return
