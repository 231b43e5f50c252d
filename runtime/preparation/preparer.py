"""Prepares files in children of the preparation process (process.py), for threads of the server."""

import os
import socket
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from runtime import log
from runtime.errors import InternalFault, InvalidRequest
from runtime.media import forks
from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.media_config import MediaConfig
from runtime.models.config.patch_image_config import PixelRange
from runtime.preparation.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Done,
    FileHead,
    FromChild,
    FromProcess,
    Opened,
    PrepareFile,
    PrepareSetup,
    Question,
    Refused,
)
from runtime.preparation.packed import read_prepared
from runtime.text.media_prompts import MediaProcessor, Prepared
from runtime.text.vocabulary import Vocabulary

LIMIT_S = 120.0  # for one file, the start of the process included
MAX_KNOWN = 256  # answers that children are given with a file
_decoder = msgspec.msgpack.Decoder(FromChild)
_process_decoder = msgspec.msgpack.Decoder(FromProcess)


class Preparer:
    """See MediaProcessor: a processor that runs elsewhere. The process starts with the first file, and again
    when it has ended."""

    def __init__(
        self,
        processor: MediaProcessor,
        folder: Path,
        encoder: MediaConfig,
        vocabulary: Vocabulary,
        pixels: Mapping[MediaKind, PixelRange],
        environment: Mapping[str, str],
    ) -> None:
        """`processor`: what `open_processor` makes of all of these; `environment`: of the process."""
        self.placeholder_ids = processor.placeholder_ids
        self.sounds, self.is_attended = processor.sounds, processor.is_attended
        self._setup = PrepareSetup(
            folder=str(folder),
            encoder_name=type(encoder).__name__,
            encoder=msgspec.msgpack.encode(encoder),
            pixels=pixels,
            special_tokens=vocabulary.files.special_tokens,
        )
        self._vocabulary, self._environment = vocabulary, environment
        self._known_lock = threading.Lock()
        self._known: OrderedDict[Question, Answer] = OrderedDict()
        self._lock = threading.Lock()  # of both below
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Its arrays are read-only. Raises InternalFault where the process, or the child
        that has this file, ends."""
        server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.settimeout(LIMIT_S)
        with server:
            try:
                with theirs:
                    self._send(media, theirs.fileno())
                return self._received(server)
            except OSError as error:  # a time-out is one
                log.get(__name__).warning("a file's preparation does not answer", why=str(error))
        raise InternalFault(
            f"{media.param}: the process that prepares the file has ended, or takes more than "
            f"{LIMIT_S:.0f} s; send this request again",
            param=media.param,
        )

    def close(self) -> None:
        """Ends the process and its children."""
        with self._lock:
            self._end()

    def _send(self, media: Media, reply: int) -> None:
        """Sends a file, with the socket for its answer. Raises OSError."""
        fds: list[int] = []
        try:
            files = [one for one in (media, media.sound) if one is not None]
            fds += [descriptor_of(one) for one in files]
            file, sound = head_of(media), None if media.sound is None else head_of(media.sound)
            with self._lock:
                with self._known_lock:
                    known = list(self._known.items())
                request = msgspec.msgpack.encode(PrepareFile(file=file, sound=sound, known=known))
                socket.send_fds(self._started(), [request], [reply, *fds])
        finally:
            for fd in fds:
                os.close(fd)

    def _received(self, server: socket.socket) -> Prepared:
        """The answer of a child, whose questions are answered meanwhile. Raises OSError where it has ended;
        InvalidRequest, InternalFault."""
        while True:
            data, fds, _, _ = socket.recv_fds(server, MAX_MESSAGE_BYTES, 1)
            if not data:
                raise ConnectionResetError("it has ended")
            try:
                match _decoder.decode(data):
                    case Question() as question:
                        server.sendall(msgspec.msgpack.encode(self._answer(question)))
                    case Done(head_at):
                        return read_prepared(fds[0], head_at)
                    case Refused(message, param, is_fault):
                        raise (InternalFault if is_fault else InvalidRequest)(message, param=param)
            finally:
                for fd in fds:
                    os.close(fd)

    def _answer(self, question: Question) -> Answer:
        if (known := self._known.get(question)) is not None:
            return known
        if question.is_name:
            id = self._vocabulary.token_id(question.text)
            answer = Answer(None if id is None else [id])
        else:
            try:
                answer = Answer(self._vocabulary.encode(question.text, add_special=False))
            except InvalidRequest as error:  # the server has no tokenizer
                answer = Answer(None, error.message)
        with self._known_lock:
            self._known[question] = answer
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return answer

    def _started(self) -> socket.socket:
        """The socket of the process, which runs and has opened the processor. Raises OSError."""
        if self._process is not None and self._process.poll() is None and self._socket is not None:
            return self._socket
        if self._process is not None:
            log.get(__name__).warning("preparation process ended", exit_code=self._process.returncode)
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(LIMIT_S)
        with theirs:
            self._process = forks.start("runtime.preparation.process", theirs.fileno(), self._environment)
        self._socket = ours
        ours.sendall(msgspec.msgpack.encode(self._setup))
        while data := ours.recv(MAX_MESSAGE_BYTES):
            match _process_decoder.decode(data):
                case Question() as question:
                    ours.sendall(msgspec.msgpack.encode(self._answer(question)))
                case Opened():
                    return ours
        raise ConnectionResetError("the process has ended; the server's log may say why")

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        self._process = self._socket = None


def head_of(media: Media) -> FileHead:
    """A file without its array."""
    return FileHead(
        kind=media.kind,
        param=media.param,
        digest=media.digest,
        shape=media.values.shape,
        rate=media.rate,
        frame_times_s=media.frame_times_s,
        num_images=media.num_images,
        kind_index=media.kind_index,
    )


def descriptor_of(media: Media) -> int:
    """A descriptor of memory that holds a file's array: that which it came in, or a copy."""
    if media.memory is not None and media.memory.values is media.values:
        return os.dup(media.memory.fd)
    fd = os.memfd_create("media", os.MFD_CLOEXEC)
    view = np.ascontiguousarray(media.values).data.cast("B")
    while view:
        view = view[os.write(fd, view) :]
    return fd
