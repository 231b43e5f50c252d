"""The event loop's side of the decode process: sends files, and takes arrays."""

import fcntl
import math
import mmap
import os
import socket
import subprocess
from collections.abc import Mapping

import anyio
import msgspec
import numpy as np
from anyio.to_thread import run_sync

from runtime import log
from runtime.errors import InternalFault, InvalidRequest
from runtime.media import forks
from runtime.media.decode_messages import MAX_MESSAGE_BYTES, DecodeRequest, DecodeResult, TextPlace
from runtime.media.settings import DecodeLimits
from runtime.messages.media import Media, MediaKind, MediaSource, SharedMemory

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE  # else a child that was taken over could change the array
_decoder = msgspec.msgpack.Decoder(DecodeResult)


class Decoders:
    """Decodes files, each in a child of the decode process. The process starts with the first file, and again
    when it has ended."""

    def __init__(self, limits: DecodeLimits, environment: Mapping[str, str]) -> None:
        """`environment`: of the process."""
        self._limits = limits
        self._environment = environment
        self._starting = anyio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    async def decode(self, source: MediaSource, fd: int, text: TextPlace | None, limit_s: float) -> Media:
        """The decoded file. `text`: where it stands as base64; None: it is no text. `limit_s`: that the
        decoder may take; it also ends when this is cancelled. Raises InvalidRequest, naming the file;
        InternalFault."""
        request = DecodeRequest(source.kind, text, limit_s, self._limits)
        await self._start()
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with reply:
            reply.setblocking(False)
            with theirs:
                await self._send(msgspec.msgpack.encode(request), [fd, theirs.fileno()])
            await anyio.wait_readable(reply)
            data, fds, _, _ = socket.recv_fds(reply, MAX_MESSAGE_BYTES, 1)
        if not data:
            raise InvalidRequest(
                f"{source.param}: the file could not be decoded within {limit_s:.3g} s and "
                f"{self._limits.memory_bytes >> 20} MiB, or ended its decoder; send a smaller or sound one",
                param=source.param,
            )
        return _media(source, _decoder.decode(data), fds)

    async def aclose(self) -> None:
        """Ends the process and its children."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            await run_sync(self._process.wait)
        self._process = self._socket = None

    async def _send(self, data: bytes, fds: list[int]) -> None:
        while self._socket is not None:
            try:
                socket.send_fds(self._socket, [data], fds)
                return
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError:
                break
        raise InternalFault("the process that decodes media has ended; send this request again")

    async def _start(self) -> None:
        async with self._starting:
            if self._process is not None and self._process.poll() is None:
                return
            if self._process is not None:
                log.get(__name__).warning("decode process ended", exit_code=self._process.returncode)
            await self.aclose()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            with theirs:
                self._process = await run_sync(
                    forks.start, "runtime.media.decode_process", theirs.fileno(), self._environment
                )
            self._socket = ours


def _media(source: MediaSource, result: DecodeResult, fds: list[int]) -> Media:
    """The media of a result. A child may have been taken over by the file it read, so nothing of it is
    believed."""
    try:
        if result.error:
            fault = f"{source.param}: the file {result.error}"
            if result.is_fault:
                raise InternalFault(fault, param=source.param)
            raise InvalidRequest(fault, param=source.param)
        values = _values(source.kind, result.shape, fds)
        if values is None or len(result.digest) != 32:
            raise InternalFault(f"{source.param}: the file's decoder failed", param=source.param)
        memory = SharedMemory(os.dup(fds[0]), values)
    finally:
        for fd in fds:
            os.close(fd)
    return Media(
        kind=source.kind,
        param=source.param,
        digest=result.digest,
        values=values,
        rate=result.rate,
        frame_times_s=result.frame_times_s,
        memory=memory,
    )


def _values(kind: MediaKind, shape: tuple[int, ...], fds: list[int]) -> np.ndarray | None:
    """The array in memory that a child has sealed, read-only; None: it has not, or the array is none of its
    kind."""
    dtype = np.dtype(np.float32 if kind is MediaKind.AUDIO else np.uint8)
    is_of_kind = len(shape) == 1 if kind is MediaKind.AUDIO else len(shape) == 4 and shape[3] == 3
    if len(fds) != 1 or not is_of_kind or min(shape) < 1:
        return None
    size = os.fstat(fds[0]).st_size
    try:
        seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
    except OSError:  # no memory that can be sealed
        return None
    if size != math.prod(shape) * dtype.itemsize or seals & SEALS != SEALS:
        return None
    return np.frombuffer(mmap.mmap(fds[0], size, prot=mmap.PROT_READ), dtype).reshape(shape)
