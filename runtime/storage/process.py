"""A backend in a process of its own, for libraries that import torch, which this process never does.

    threads ── StoreCall ──► socket, one for each call at a time ──► torch_stores, a thread for each socket
            ◄── StoreReply ──
    records: one place for each socket in memory that both processes map

The process ends with its sockets. When it dies its calls fail, which makes misses, and the next call after
AGAIN_S starts another one.
"""

import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from time import monotonic

from msgspec import msgpack

from runtime.errors import StartError
from runtime.storage.backend import BackendConfig, Damaged
from runtime.storage.calls import MAX_MESSAGE_BYTES, Setup, StoreCall, StoreReply

MODULE = "runtime.storage.torch_stores"
NUM_CALLS = 8  # at once
MAX_KEYS = 4096  # of one call
START_S = 120.0  # for the library's imports and connections
CALL_S = 60.0
AGAIN_S = 10.0  # between two starts
END_S = 5.0
_REPLIES = msgpack.Decoder(StoreReply)


class StoreProcess:
    """One process, from its start to its end."""

    def __init__(self, backend: str, config: BackendConfig) -> None:
        """Raises StartError where it can't start, with the library's reason."""
        size = config.record_bytes
        memory = os.memfd_create("records", os.MFD_CLOEXEC)
        os.ftruncate(memory, NUM_CALLS * size)
        self._memory = mmap.mmap(memory, NUM_CALLS * size)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(NUM_CALLS)]
        own, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        fds = [memory, *(one.fileno() for one in theirs)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *map(str, fds)], stdin=subprocess.DEVNULL, pass_fds=fds
            )
        finally:
            os.close(memory)
            for one in theirs:
                one.close()
        view = memoryview(self._memory)
        self._free: queue.LifoQueue[tuple[socket.socket, memoryview]] = queue.LifoQueue()
        self._sockets = own
        for number, one in enumerate(own):
            one.settimeout(CALL_S)
            self._free.put((one, view[number * size : (number + 1) * size]))
        setup = Setup(backend, size, config.identity, dict(config.settings))
        try:
            own[0].settimeout(START_S)
            reply = _exchange(own[0], msgpack.encode(setup))
            own[0].settimeout(CALL_S)
        except OSError as error:
            self.close()
            raise StartError(
                f"--hicache-storage-backend {backend}: its process ended or hung at its start ({error}); "
                "its output says why"
            ) from None
        if reply.error:
            self.close()
            raise StartError(reply.error)

    def call(
        self, call: StoreCall, given: Sequence[memoryview] = (), wanted: Sequence[memoryview] = ()
    ) -> int:
        """The call's result; `given`: the record that it writes; `wanted`: where the one that it reads goes.
        Raises OSError, Damaged."""
        lane, record = self._free.get()
        at = 0
        for part in given:
            record[at : at + part.nbytes] = part
            at += part.nbytes
        try:
            reply = _exchange(lane, msgpack.encode(call))
        except OSError:
            self.kill()  # its answer to this call may still come, in the place of another one's
            raise
        finally:
            self._free.put((lane, record))
        if reply.is_damaged:
            raise Damaged(reply.error)
        if reply.error:
            raise OSError(reply.error)
        for part in wanted if reply.value else ():
            part[:] = record[at : at + part.nbytes]
            at += part.nbytes
        return reply.value

    @property
    def is_alive(self) -> bool:
        """Whether it takes calls."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Lets it end, and kills it where it does not."""
        for one in self._sockets:
            one.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()


class ProcessBackend:
    """See Backend. The backend of `torch_stores` that `name` stands for."""

    def __init__(self, name: str, config: BackendConfig) -> None:
        """Raises StartError."""
        self._name, self._config = name, config
        self._lock = threading.Lock()
        self._process = StoreProcess(name, config)
        self._started_s = monotonic()

    def contains(self, keys: Sequence[bytes]) -> int:
        """See Backend.contains."""
        for at in range(0, len(keys), MAX_KEYS):
            batch = list(keys[at : at + MAX_KEYS])
            if (count := self._alive().call(StoreCall("contains", batch))) < len(batch):
                return at + count
        return len(keys)

    def read(self, key: bytes, buffers: Sequence[memoryview]) -> bool:
        """See Backend.read."""
        return bool(self._alive().call(StoreCall("read", [key]), wanted=buffers))

    def write(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        """See Backend.write."""
        self._alive().call(StoreCall("write", [key]), given=buffers)

    def remove(self, key: bytes) -> None:
        """See Backend.remove."""
        self._alive().call(StoreCall("remove", [key]))

    def clear(self) -> int:
        """See Backend.clear."""
        return self._alive().call(StoreCall("clear", []))

    def stats(self) -> Mapping[str, float]:
        """See Backend.stats: the process is not asked."""
        return {}

    def close(self) -> None:
        """See Backend.close."""
        self._process.close()

    def _alive(self) -> StoreProcess:
        """The process, started again where it has died. Raises OSError."""
        with self._lock:
            if self._process.is_alive:
                return self._process
            if monotonic() - self._started_s < AGAIN_S:
                raise OSError(f"the process of {self._name} has died; it is started again soon")
            self._process.close()
            self._started_s = monotonic()
            try:
                self._process = StoreProcess(self._name, self._config)
            except StartError as error:
                raise OSError(str(error)) from None
            return self._process


def _exchange(lane: socket.socket, message: bytes) -> StoreReply:
    """Raises OSError where no answer comes."""
    lane.send(message)
    if not (answer := lane.recv(MAX_MESSAGE_BYTES)):
        raise ConnectionError("the process has ended")
    return _REPLIES.decode(answer)
