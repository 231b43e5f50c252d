"""The process of a backend: `python -m runtime.storage.torch_stores MEMORY SOCKET ...`, descriptors of the
memory of records and of a socket for each call at a time. It ends when the sockets do."""

import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from msgspec import msgpack

from runtime.errors import StartError
from runtime.storage.backend import Backend, BackendConfig, Damaged
from runtime.storage.calls import MAX_MESSAGE_BYTES, Setup, StoreCall, StoreReply

END_S = 3.0  # for calls that still run when the other process has ended
_CALLS = msgpack.Decoder(StoreCall)


def open_aibrix(config: BackendConfig) -> Backend:
    """Raises StartError."""
    from runtime.storage.torch_stores.aibrix import AibrixBackend

    return AibrixBackend(config)


def open_lmcache(config: BackendConfig) -> Backend:
    """Raises StartError."""
    from runtime.storage.torch_stores.lmcache import LmcacheBackend

    return LmcacheBackend(config)


def open_simm(config: BackendConfig) -> Backend:
    """Raises StartError."""
    from runtime.storage.torch_stores.simm import SimmBackend

    return SimmBackend(config)


BACKENDS: dict[str, Callable[[BackendConfig], Backend]] = {
    "aibrix": open_aibrix,
    "lmcache": open_lmcache,
    "simm": open_simm,
}


def main(fds: list[int]) -> None:
    """Serves calls until the sockets end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    lanes = [socket.socket(fileno=fd) for fd in fds[1:]]
    setup = msgpack.decode(lanes[0].recv(MAX_MESSAGE_BYTES), type=Setup)
    try:
        backend = BACKENDS[setup.backend](
            BackendConfig(record_bytes=setup.record_bytes, identity=setup.identity, settings=setup.settings)
        )
    except StartError as error:
        lanes[0].send(msgpack.encode(StoreReply(error=str(error))))
        return
    except Exception as error:  # the library's own classes
        text = f"--hicache-storage-backend {setup.backend} can't start ({type(error).__name__}: {error})"
        lanes[0].send(msgpack.encode(StoreReply(error=text)))
        return
    memory = memoryview(mmap.mmap(fds[0], len(lanes) * setup.record_bytes))
    lanes[0].send(msgpack.encode(StoreReply()))
    threads: list[threading.Thread] = []
    for number, lane in enumerate(lanes):
        record = memory[number * setup.record_bytes : (number + 1) * setup.record_bytes]
        threads.append(threading.Thread(target=serve, args=(lane, record, backend), daemon=True))
        threads[-1].start()
    threads[0].join()
    timer = threading.Timer(END_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
    for thread in threads:
        thread.join()
    backend.close()
    sys.stdout.flush()
    os._exit(0)  # threads of libraries may run on


def serve(lane: socket.socket, record: memoryview, backend: Backend) -> None:
    """Answers the calls of one socket; `record`: its place in memory."""
    while message := lane.recv(MAX_MESSAGE_BYTES):
        lane.send(msgpack.encode(answer(_CALLS.decode(message), record, backend)))


def answer(call: StoreCall, record: memoryview, backend: Backend) -> StoreReply:
    """Calls a backend."""
    try:
        match call.method:
            case "contains":
                return StoreReply(backend.contains(call.keys))
            case "read":
                return StoreReply(int(backend.read(call.keys[0], [record])))
            case "write":
                backend.write(call.keys[0], [record])
            case "remove":
                backend.remove(call.keys[0])
            case "clear":
                return StoreReply(backend.clear())
    except Damaged as error:
        return StoreReply(error=str(error), is_damaged=True)
    except Exception as error:  # the library's own classes
        return StoreReply(error=f"{type(error).__name__}: {error}"[:10_000])
    return StoreReply()


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
