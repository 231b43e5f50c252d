"""A line for each HTTP request: who asked for what, what came of it, how long it took. Not its query and
headers: they may hold keys."""

from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime import log

LEFT = 499  # the client went before there was an answer; nginx's number for it


def level_of(status: int) -> str:
    return "error" if status >= 500 else "warning" if status >= 400 and status != LEFT else "info"


class AccessLog:
    """Tells requests whose line is at least of this level: info all, warning those that were refused, error
    those that failed."""

    def __init__(self, level: str, excluded: tuple[str, ...] = ()) -> None:
        """`excluded`: beginnings of paths."""
        self._least = log.LEVELS[level]
        self._excluded = excluded
        self._log = log.get("http")

    async def serve(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, request_id: bytes
    ) -> None:
        begin_s, status = monotonic(), LEFT

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, noting)
        finally:
            level = level_of(status)
            if log.LEVELS[level] >= self._least and not scope["path"].startswith(self._excluded):
                client = scope.get("client")
                getattr(self._log, level)(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(monotonic() - begin_s, 6),
                    client=client[0] if client else None,
                    id=request_id.decode(),
                )
