"""/health of a node that has ranks only: whether it is connected to node 0."""

from collections.abc import Callable

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from runtime import log
from runtime.http.hosts import authority
from runtime.http.server import listen, serve


class NodeHealth:
    """The health of a node."""

    def __init__(self, node: int) -> None:
        self.is_here: Callable[[], bool] = lambda: False  # whether node 0 is connected
        self._node = node

    async def answer(self, request: Request) -> Response:
        """200 while node 0 is connected, else 503."""
        status = ("loading", "ready")[self.is_here()]
        return JSONResponse({"status": status, "node": self._node}, 200 if self.is_here() else 503)


async def serve_health(health: NodeHealth, host: str, port: int) -> None:
    """Serves /health, and nothing else, until cancelled. Raises StartError where the port is taken."""
    sockets = listen(host, port)
    log.get("server").info("listening", url=f"http://{authority(host, sockets[0].getsockname()[1])}/health")
    app = Starlette(routes=[Route("/health", health.answer)])
    await serve(app, sockets=sockets, shutdown=anyio.Event())
