"""`runtime serve`: a Core and the HTTP or gRPC server on one event loop.

Everything that the process does is started here: read `main` top to bottom.
"""

import gc
import signal
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import anyio
import uvloop
from anyio.abc import TaskStatus
from msgspec import Struct

from runtime import log
from runtime.actors.child_environment import raise_open_files
from runtime.actors.rank_processes import RankProcesses
from runtime.admin.adapter_registry import AdapterRegistry, open_adapters
from runtime.admin.systemd import Notifier
from runtime.core import Core
from runtime.errors import AddressInUse, OptionsError, RuntimeFault, StartError, install_line
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.hosts import authority
from runtime.http.key_file import read_key_file
from runtime.http.openai.stored_objects import StoredObjects, open_stored_objects
from runtime.http.server import check_address, listen, serve, tls_context
from runtime.http.settings import HttpSettings, http_settings
from runtime.options.facts import missing_device
from runtime.options.groups.http import other_files
from runtime.options.plan import Plan
from runtime.shutdown import FORCE_S, SIGNALS, end_by_force
from runtime.start import Prepared, prepare

# Python's 700 new objects are the tokens of a few steps; most are gone by themselves soon after
GC_THRESHOLDS = (10_000, 10, 10)


def run(plan: Plan, processes: RankProcesses | None = None) -> int:
    """Serves until a signal, or until the ranks cannot be started again. -> exit code. `processes`: those of
    the ranks, where they have been started. Raises StartError when the server cannot start."""
    log.setup(plan.logs.log_level, plan.logs.log_format)
    log.take_logging()
    for notice in plan.notices:
        log.get("options").warning(notice)
    _raise_open_files(plan)
    gc.freeze()  # what was imported stays: collections need not look at it
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    return uvloop.run(main(plan, processes))


def _raise_open_files(plan: Plan) -> None:
    """Lets this process and its ranks open as many files as the machine allows them, and warns where these
    are too few for --max-connections."""
    most = raise_open_files()
    needed = plan.http.max_connections + other_files(plan.parallel.num_ranks)
    if needed > most:
        log.get("server").warning(
            f"--max-connections {plan.http.max_connections} needs {needed} open files, and the process may "
            f"have {most}; raise that (ulimit -Hn), or ranks may lack files to start again"
        )


class Checked(Struct, frozen=True):
    """What a check has read of a start that can succeed."""

    prepared: Prepared
    adapters: AdapterRegistry | None
    notes: list[str]  # what is in the way on this machine at this moment


def check(plan: Plan) -> Checked:
    """Refuses what `main` would refuse before anything acts, in the same order and words, but for what the
    machine may have at another moment. Raises StartError."""
    notes = []
    _read_tls(plan)
    try:
        check_address(plan.http.host, plan.http.port)
    except AddressInUse as error:
        notes.append(str(error))
    if plan.api.api_key_file is not None:
        read_key_file(Path(plan.api.api_key_file))
    prepared = prepare(plan)
    adapters = open_adapters(plan, prepared.model)
    if (problem := missing_device(plan.parallel.device)) is not None:
        notes.append(problem)
    return Checked(prepared, adapters, notes)


def _read_tls(plan: Plan) -> ssl.SSLContext | None:
    """The TLS of the server; None without. Raises StartError for files that do not do, and where gRPC is not
    installed or cannot use them."""
    files = (plan.http.ssl_certfile, plan.http.ssl_keyfile)
    password, authorities = plan.http.ssl_keyfile_password, plan.http.ssl_ca_certs
    tls = None if files[0] is None else tls_context(files[0], files[1], password, authorities)
    if plan.http.grpc_mode:
        _rpc().credentials_of(*files, password, authorities, tls)
    return tls


def _rpc() -> ModuleType:
    try:
        from runtime.rpc import server as rpc
    except ImportError:
        raise OptionsError([f"--grpc-mode needs grpcio and protobuf: {install_line('grpc')}"]) from None
    return rpc


async def main(plan: Plan, processes: RankProcesses | None = None) -> int:
    """Starts the core and a server, and waits for their end. -> exit code. Raises StartError."""
    tls = _read_tls(plan)
    check_address(plan.http.host, plan.http.port)
    settings = http_settings(plan)
    core = Core(plan, processes=processes)
    stored_objects = open_stored_objects(core, plan, core.instruments)
    stop = anyio.Event()  # set to close the server
    # the server listens from here on
    server = (
        _grpc_server(core, plan, settings, tls)
        if plan.http.grpc_mode
        else _http_server(core, plan, settings, stored_objects, tls)
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch_signals, core, stop, plan.http.shutdown_timeout)
        if plan.api.api_key_file is not None:
            await tasks.start(_watch_key_file, settings.keys, Path(plan.api.api_key_file))
        tasks.start_soon(_run_core, core, stop)
        tasks.start_soon(stored_objects.run)
        if notifier := Notifier.from_environment():
            tasks.start_soon(notifier.follow, core.health)
        await server(stop)
        tasks.cancel_scope.cancel()
    if isinstance(core.failure, StartError):
        raise core.failure
    return 0 if core.failure is None else 1


Server = Callable[[anyio.Event], Awaitable[None]]  # serves until the event is set


def _http_server(
    core: Core, plan: Plan, settings: HttpSettings, stored_objects: StoredObjects, tls: ssl.SSLContext | None
) -> Server:
    app = http_app(core, settings, stored_objects)
    sockets = listen(plan.http.host, plan.http.port)
    _log_listening("http", plan, sockets[0].getsockname()[1])
    return lambda stop: serve(
        app,
        sockets=sockets,
        shutdown=stop,
        tls=tls,
        root_path=plan.http.fastapi_root_path,
        remaining_s=core.deadline.remaining_s,
        has_h2c=plan.http.enable_h2c,
        max_connections=plan.http.max_connections,
    )


def _grpc_server(core: Core, plan: Plan, settings: HttpSettings, tls: ssl.SSLContext | None) -> Server:
    rpc = _rpc()
    credentials = rpc.credentials_of(
        plan.http.ssl_certfile,
        plan.http.ssl_keyfile,
        plan.http.ssl_keyfile_password,
        plan.http.ssl_ca_certs,
        tls,
    )
    server = rpc.Rpc(core, settings, plan.http.host, plan.http.port, credentials, plan.http.max_connections)
    _log_listening("grpc", plan, server.port)
    return partial(server.serve, remaining_s=core.deadline.remaining_s)


def _log_listening(scheme: str, plan: Plan, port: int) -> None:
    log.get("server").info(
        "listening",
        url=f"{scheme}{'s' if plan.http.ssl_certfile else ''}://{authority(plan.http.host, port)}",
    )


async def _run_core(core: Core, stop: anyio.Event) -> None:
    await core.run()
    stop.set()


async def _watch_signals(core: Core, stop: anyio.Event, timeout_s: float) -> None:
    """When the core is ready: the first signal drains, so no new requests come and the open ones may finish;
    the second stops at once. Until then a signal ends the process (shutdown.py)."""
    with suppress(RuntimeFault):  # it cannot start, which ends the server as well
        await core.wait_ready()
    with anyio.open_signal_receiver(*SIGNALS) as signals:
        async with anyio.create_task_group() as tasks:
            async for number in signals:
                is_second = core.deadline.is_set
                core.deadline.set(0.0 if is_second else timeout_s)
                end_by_force(core.deadline.remaining_s() + FORCE_S)
                if is_second:
                    log.get("server").info("stopping", signal=number.name)
                    break
                log.get("server").info("draining", signal=number.name, seconds=timeout_s)
                tasks.start_soon(_drain, core, stop, timeout_s)
            tasks.cancel_scope.cancel()
    await _drain(core, stop, 0.0)


async def _watch_key_file(keys: Keys, path: Path, *, task_status: TaskStatus[None]) -> None:
    """SIGHUP reads --api-key-file again. A file that cannot be used changes nothing."""
    with anyio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            try:
                named = await anyio.to_thread.run_sync(read_key_file, path)
            except StartError as error:
                log.get("keys").error("the keys stay as they were", error=str(error))
            else:
                keys.replace(named)
                log.get("keys").info("the keys were read again", tenants=len(set(named.values())))


async def _drain(core: Core, stop: anyio.Event, deadline_s: float) -> None:
    await core.drain(deadline_s)
    stop.set()
