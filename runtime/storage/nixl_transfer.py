"""The end of a transfer that an agent of NIXL has begun (nixl_agent of its Python API), for stores and for
servers that send one another pages."""

import threading
import time
from typing import Protocol

POLL_S = 0.0002  # NIXL has no call that waits


class Transfers(Protocol):
    """The methods of `nixl_agent` for a transfer that has begun."""

    def check_xfer_state(self, handle: object) -> str:
        """-> DONE, PROC or ERR"""
        ...

    def release_xfer_handle(self, handle: object) -> None:
        """Frees a handle; ends its transfer."""
        ...


def finish_transfer(
    agent: Transfers, lock: threading.Lock, handle: object, state: str, limit_s: float
) -> str:
    """Waits in this thread until a transfer has ended, for `limit_s` seconds at most, and frees its handle.
    `state`: the one with which it began; `lock`: held for each call of the agent. -> the last state"""
    try:
        deadline = time.monotonic() + limit_s
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(POLL_S)
            with lock:
                state = agent.check_xfer_state(handle)
    finally:
        with lock:
            agent.release_xfer_handle(handle)
    return state
