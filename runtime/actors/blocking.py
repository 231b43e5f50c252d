"""An event loop in a thread of its own, for code without one."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Self, TypeVar, TypeVarTuple, overload

from anyio.from_thread import start_blocking_portal

from runtime.errors import Unavailable

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Blocking:
    """Base of blocking APIs: keeps an async context manager open on the loop of its own thread. Close it, or
    use `with`."""

    def __init__(self, inner: AbstractAsyncContextManager[object]) -> None:
        """Opens `inner`. Raises what opening it raises."""
        self._is_closed = False
        self._portal_context = start_blocking_portal("asyncio", {"use_uvloop": True})
        self._portal = self._portal_context.__enter__()
        self._inner_context: AbstractContextManager[object] = self._portal.wrap_async_context_manager(inner)
        try:
            self._inner_context.__enter__()
        except BaseException:
            self._portal_context.__exit__(None, None, None)
            raise

    @overload
    def _call(self, function: Callable[[*Args], Coroutine[object, object, T]], *args: *Args) -> T: ...

    @overload
    def _call(self, function: Callable[[*Args], T], *args: *Args) -> T: ...

    def _call(self, function: Callable[[*Args], object], *args: *Args) -> object:
        if self._is_closed:
            raise Unavailable("this LLM is closed; make another one")
        return self._portal.call(function, *args)

    def close(self) -> None:
        """Closes the context manager and ends the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._inner_context.__exit__(None, None, None)
        self._portal_context.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
