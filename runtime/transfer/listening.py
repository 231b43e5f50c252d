"""Sockets that other servers connect to, for pages of prompts and for encodings."""

import asyncio
import socket
from collections.abc import Callable

import anyio

from runtime import log
from runtime.errors import StartError

LOG = log.get("transfer")
MAX_CONNECTIONS = 1024


async def accept_connections(listener: socket.socket, take: Callable[[socket.socket, str], None]) -> None:
    """Gives `take` each connection and the address of its other end, until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, address = await loop.sock_accept(listener)
        except OSError as error:  # too many open files: others have to end first
            LOG.warning("a connection could not be accepted", error=str(error))
            await anyio.sleep(0.1)
            continue
        connection.setblocking(False)
        take(connection, "this machine" if connection.family == socket.AF_UNIX else str(address[0]))


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. Raises StartError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(MAX_CONNECTIONS)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StartError(
            f"--disaggregation-bootstrap-port {port} can't be listened on at {host} "
            f"({error.strerror or error}); give another one, or 0 for a free one"
        ) from None
    listener.setblocking(False)
    return listener


def listen_locally(name: bytes) -> socket.socket:
    """A socket that takes connections from this machine under an abstract name (unix(7)). Raises
    StartError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise StartError(
            f"--disaggregation-transfer-backend shm: {name.decode()!r} can't be listened on "
            f"({error.strerror}); give another --disaggregation-bootstrap-port"
        ) from None
    listener.setblocking(False)
    return listener
