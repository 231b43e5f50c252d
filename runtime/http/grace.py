"""The time that what runs has when the server stops."""

from collections.abc import Callable

import anyio

GRACE_S = 30.0  # for running answers, after a request to shut down
FLUSH_S = 0.2  # after the deadline: for what was written last to leave
LOOK_S = 0.05  # between two looks at the deadline


async def cancel_after_grace(
    scope: anyio.CancelScope, remaining_s: Callable[[], float], grace_s: float = GRACE_S
) -> None:
    """Cancels `scope` after `grace_s`, or when `remaining_s` says 0: a second signal moves the deadline to
    now."""
    end_s = anyio.current_time() + grace_s
    while (left_s := min(end_s - anyio.current_time(), remaining_s())) > 0:
        await anyio.sleep(min(left_s, LOOK_S))
    await anyio.sleep(FLUSH_S)
    scope.cancel()
