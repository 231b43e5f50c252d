"""The access log: one line for each HTTP request, with client, path, status and time. Query and headers are
left out, because they may hold keys."""

from time import monotonic

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime import log

CLIENT_CLOSED = 499  # the client left before there was an answer; nginx's number for it


def level_of(status: int) -> str:
    """The log level of an answer with this status."""
    return "error" if status >= 500 else "warning" if status >= 400 and status != CLIENT_CLOSED else "info"


class AccessLog:
    """Logs requests from a level on: info logs all, warning those that were refused, error those that
    failed."""

    def __init__(self, level: str, excluded: tuple[str, ...] = ()) -> None:
        """`excluded`: prefixes of paths that are not logged."""
        self._least = log.LEVELS[level]
        self._excluded = excluded
        self._log = log.get("http")

    async def serve(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, request_id: bytes
    ) -> None:
        """Serves a request with `app` and logs it."""
        begin_s, status = monotonic(), CLIENT_CLOSED

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_noting_status)
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
