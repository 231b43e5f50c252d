"""The process of `runtime route`: listens, serves, watches its servers, ends by a signal."""

import anyio
import uvloop

from runtime import log
from runtime.http.auth import Keys
from runtime.http.hosts import authority
from runtime.http.server import listen, serve
from runtime.options.groups.http import is_loopback
from runtime.routing.app import RouterApp
from runtime.routing.pairs import Pairs
from runtime.routing.workers import Workers
from runtime.shutdown import SIGNALS

LOG = log.get("route")


def run(workers: Workers | Pairs, host: str, port: int, admin_key: str | None) -> int:
    """Routes until a signal ends it; then running answers may end. Raises StartError for an address that is
    not free."""
    return uvloop.run(_main(workers, host, port, admin_key))


async def _main(workers: Workers | Pairs, host: str, port: int, admin_key: str | None) -> int:
    app = RouterApp(workers, Keys(admin=admin_key, is_local=is_loopback(host)))
    sockets = listen(host, port)
    stop = anyio.Event()
    url = f"http://{authority(host, sockets[0].getsockname()[1])}"
    LOG.info("listening", url=url, servers=len(workers.by_url), policy=workers.settings.policy)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.watch)
        tasks.start_soon(_stop_on_signal, stop)
        await serve(app, sockets=sockets, shutdown=stop)
        tasks.cancel_scope.cancel()
    workers.close()
    return 0


async def _stop_on_signal(stop: anyio.Event) -> None:
    with anyio.open_signal_receiver(*SIGNALS) as signals:
        async for _ in signals:
            stop.set()
            return
