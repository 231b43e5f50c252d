"""The decode process: `python -m runtime.media.decode_process`, started by decoders.py when the first file
comes.

Decoders are C code that reads what strangers wrote. So each file is decoded in a child of this process, which
is forked with the libraries loaded, has bounds on its time, memory and descriptors, and may die. What it
decoded goes to the event loop as memory without a name, sealed against change.

This process has one thread, and ends when its parent closes the socket.
"""

import argparse
import fcntl
import importlib
import os
import socket
from contextlib import suppress

import msgspec
import numpy as np

from runtime import log
from runtime.media import forks
from runtime.media.decode import decode_file
from runtime.media.decode_messages import MAX_MESSAGE_BYTES, DecodeError, DecodeRequest, DecodeResult

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_LIBRARIES = ("runtime.media.images", "runtime.media.videos", "runtime.media.sounds")
_decoder = msgspec.msgpack.Decoder(DecodeRequest)


def _run_child(data: bytes, fds: list[int]) -> None:
    """The whole work of a child, whose request comes with two descriptors: the file, and the socket for its
    result."""
    request, (file, reply) = _decoder.decode(data), fds
    limits = request.limits
    fd: list[int] = []
    try:
        forks.confine(
            forks.Bounds(
                limit_s=request.limit_s,
                cpu_s=limits.cpu_s,
                memory_bytes=limits.memory_bytes,
                file_bytes=limits.max_value_bytes,
            )
        )
        forks.end_with(reply)
        result, values = decode_file(file, request)
        fd = [_sealed(values)]
    except DecodeError as error:
        result = DecodeResult(error=str(error)[:1000])
    except MemoryError:
        result = DecodeResult(error="takes too much memory when it is decoded; send a smaller one")
    except Exception:
        log.write_stack()
        result = DecodeResult(error="could not be decoded; the server's log has the details", is_fault=True)
    with suppress(OSError), socket.socket(fileno=reply) as answer:  # the request may have ended
        socket.send_fds(answer, [msgspec.msgpack.encode(result)], fd)


def _sealed(values: np.ndarray) -> int:
    """Memory without a name that holds an array, which this process cannot change any more."""
    fd = os.memfd_create("values", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = np.ascontiguousarray(values).data.cast("B")
    while view:
        view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def main() -> None:
    """Runs the process."""
    parser = argparse.ArgumentParser(
        prog="runtime.media.decode_process",
        description="Decodes images, videos and sounds; started by the runtime, not by hand.",
    )
    parser.add_argument("--socket", type=int, required=True, help="descriptor")
    arguments = parser.parse_args()
    forks.lower_priority()
    for name in _LIBRARIES:
        with suppress(ImportError):  # a file that needs it is refused with what to install
            importlib.import_module(name)
    with socket.socket(fileno=arguments.socket) as connection:
        forks.serve(connection, MAX_MESSAGE_BYTES, _run_child)


if __name__ == "__main__":
    main()
