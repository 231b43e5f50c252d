"""Where ranks of several nodes meet: a store that rank 0 serves on the node that the first of them are on
(devices/torch_collectives.py)."""

import os
import socket

PREFIX_BYTES = 16
BACKLOG = 64


def open_rendezvous(host: str) -> tuple[socket.socket, str]:
    """-> a socket on which rank 0 serves the store, on the address `host` alone, and StartRank.rendezvous for
    all ranks. Rank 0 inherits the socket's descriptor; it stays the caller's. Raises OSError."""
    family, kind, _, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.bind(target)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    shown = f"[{host}]" if ":" in host else host
    prefix = os.urandom(PREFIX_BYTES).hex()
    return listener, f"tcp://{shown}:{listener.getsockname()[1]}/{prefix}?fd={listener.fileno()}"
