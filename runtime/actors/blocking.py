"""An event loop in a thread of its own, for code without one."""

import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from threading import Thread, main_thread
from typing import Self, TypeVar, TypeVarTuple, overload

import anyio
from anyio.from_thread import BlockingPortal

from runtime.errors import Unavailable

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Blocking:
    """Base of blocking APIs: keeps an async context manager open on the loop of its own thread. Close it, or
    use `with`; the end of the main thread closes it too, since Python waits for threads when it exits."""

    def __init__(self, inner: AbstractAsyncContextManager[object]) -> None:
        """Opens `inner`. Raises what opening it raises."""
        self._is_closed = False
        self._process = os.getpid()
        portal: Future[BlockingPortal] = Future()
        self._thread = Thread(target=_run_loop, args=(portal,), name="event loop")
        self._thread.start()
        self._portal = portal.result()
        self._inner_context: AbstractContextManager[object] = self._portal.wrap_async_context_manager(inner)
        try:
            self._inner_context.__enter__()
        except BaseException:
            self._end_loop()
            raise
        Thread(target=self._close_at_exit, name="close at exit", daemon=True).start()

    @overload
    def _call(self, function: Callable[[*Args], Coroutine[object, object, T]], *args: *Args) -> T: ...

    @overload
    def _call(self, function: Callable[[*Args], T], *args: *Args) -> T: ...

    def _call(self, function: Callable[[*Args], object], *args: *Args) -> object:
        if self._is_closed:
            raise Unavailable("this LLM is closed; make another one")
        if os.getpid() != self._process:  # forked: the thread of the loop is not here
            raise Unavailable("this LLM belongs to another process; make one in each")
        return self._portal.call(function, *args)

    def close(self) -> None:
        """Closes the context manager and ends the thread. Idempotent; nothing in a process that was forked
        since."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        self._inner_context.__exit__(None, None, None)
        self._end_loop()

    def _end_loop(self) -> None:
        self._portal.call(self._portal.stop)
        self._thread.join()

    def _close_at_exit(self) -> None:
        main_thread().join()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_loop(opened: Future[BlockingPortal]) -> None:
    """Runs an event loop until its portal, the result of `opened`, is stopped."""

    async def main() -> None:
        async with BlockingPortal() as portal:
            opened.set_result(portal)
            await portal.sleep_until_stopped()

    try:
        anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})
    except BaseException as error:
        if opened.done():
            raise
        opened.set_exception(error)
