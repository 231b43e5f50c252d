"""The preparation process: `python -m runtime.preparation.process`, started by preparer.py when the first
file comes.

It opens the model's processor and forks children, which prepare the files (workers.py). There is no tokenizer
here: the server is asked for the few tokens that stand among those of a file.
"""

import argparse
import gc
import mmap
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer, models

from runtime import log
from runtime.errors import InvalidRequest, RequestError
from runtime.media import forks
from runtime.messages.media import Media
from runtime.preparation.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Done,
    FileHead,
    FromChild,
    Opened,
    PrepareFile,
    PrepareSetup,
    Question,
    Refused,
)
from runtime.preparation.packed import write_prepared
from runtime.preparation.workers import Workers
from runtime.text.open_media import open_processor
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary

BOUNDS = forks.Bounds(limit_s=120.0, cpu_s=60, memory_bytes=4 << 30, file_bytes=1 << 30)
# numbers of an array, up to which its file is small: pixels of 1024 x 1024, or 65 s of sound of 48 kHz
SMALL = 3 << 20
_file_decoder = msgspec.msgpack.Decoder(PrepareFile)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


class AskedVocabulary(Vocabulary):
    """The server's tokenizer, as far as processors of files need one."""

    def __init__(self, special_tokens: Mapping[str, str], server: socket.socket) -> None:
        super().__init__(Tokenizer(models.BPE()), TokenizerFiles())
        self.files = TokenizerFiles(special_tokens=dict(special_tokens))
        self._known: dict[Question, Answer] = {}
        self._server = server

    def ask(self, server: socket.socket, known: Iterable[tuple[Question, Answer]]) -> None:
        """Has questions go to this socket from now on, but for those whose answers are known."""
        self._server, self._known = server, dict(known)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The tokens of a text, without special ones. Raises InvalidRequest where texts have none."""
        answer = self._answer(Question(text, is_name=False))
        if answer.ids is None:
            raise InvalidRequest(answer.error, param="prompt")
        return answer.ids

    def token_id(self, token: str) -> int | None:
        """The id of a token; None: there is no such token."""
        answer = self._answer(Question(token, is_name=True))
        return None if answer.ids is None else answer.ids[0]

    def _answer(self, question: Question) -> Answer:
        if question not in self._known:
            self._server.sendall(msgspec.msgpack.encode(question))
            data = self._server.recv(MAX_MESSAGE_BYTES)
            if not data:
                raise ConnectionResetError("the server has ended")
            self._known[question] = _answer_decoder.decode(data)
        return self._known[question]


class Children:
    """What the children of the process do, with the processor that it has opened."""

    def __init__(self, setup: PrepareSetup, server: socket.socket) -> None:
        """Raises ModelError, ConnectionError."""
        self._vocabulary = AskedVocabulary(setup.special_tokens, server)
        folder, config = Path(setup.folder), setup.media_config
        processor = open_processor(folder, config, self._vocabulary, setup.pixels)
        assert processor is not None, "an encoder has a processor"
        self._processor = processor

    def serve(self, connection: socket.socket) -> None:
        """Has children prepare the files of a connection until its other end is closed."""
        forks.forget_children()
        workers = Workers(connection, MAX_MESSAGE_BYTES, lambda: forks.confine(BOUNDS), self._run)
        while True:
            data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3)
            if not data:
                return
            request = _file_decoder.decode(data)
            heads = [one for one in (request.file, request.sound) if one is not None]
            workers.give(data, fds, is_small=sum([prod(one.shape) for one in heads]) <= SMALL)
            for fd in fds:
                os.close(fd)

    def _run(self, data: bytes, fds: list[int]) -> bool:
        """A child's work on a file. -> whether the child may prepare others"""
        request, (reply, *arrays) = _file_decoder.decode(data), fds
        memory: list[int] = []
        result: FromChild
        may_go_on = True
        with socket.socket(fileno=reply) as server:
            try:
                forks.limit_time(BOUNDS)
                forks.end_with(reply, is_written_to=True)
                self._vocabulary.ask(server, request.known)
                fd, head_at = self._prepared(request, arrays)
                memory, result = [fd], Done(head_at)
            except RequestError as error:
                result = Refused(error.message, error.param)
            except MemoryError:
                message = f"{request.file.param}: the file takes too much memory when it is prepared"
                result, may_go_on = Refused(f"{message}; send a smaller one", request.file.param), False
            except Exception:
                log.write_stack()
                message = f"{request.file.param} could not be prepared; the server's log has the details"
                result, may_go_on = Refused(message, request.file.param, is_fault=True), False
            forks.go_on_after(reply)
            with suppress(OSError):  # the request may have ended
                socket.send_fds(server, [msgspec.msgpack.encode(result)], memory)
        for fd in [*arrays, *memory]:
            os.close(fd)
        return may_go_on

    def _prepared(self, request: PrepareFile, arrays: list[int]) -> tuple[int, int]:
        """Memory with the file as the encoder takes it; see write_prepared. Raises InvalidRequest."""
        sound = None if request.sound is None else _media(request.sound, arrays[1])
        media = msgspec.structs.replace(_media(request.file, arrays[0]), sound=sound)
        return write_prepared(self._processor.prepare(media))


def _media(head: FileHead, fd: int) -> Media:
    """A decoded file whose array lies in the memory of a descriptor."""
    memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    return Media(
        kind=head.kind,
        param=head.param,
        digest=head.digest,
        values=np.frombuffer(memory, head.dtype).reshape(head.shape),
        rate=head.rate,
        frame_times_s=head.frame_times_s,
        num_images=head.num_images,
        kind_index=head.kind_index,
    )


def main() -> None:
    """Runs the process."""
    parser = argparse.ArgumentParser(
        prog="runtime.preparation.process",
        description="Prepares files for the encoder; started by the runtime, not by hand.",
    )
    parser.add_argument("--socket", type=int, required=True, help="descriptor")
    arguments = parser.parse_args()
    forks.lower_priority()
    with socket.socket(fileno=arguments.socket) as connection:
        if data := connection.recv(MAX_MESSAGE_BYTES):
            children = Children(msgspec.msgpack.decode(data, type=PrepareSetup), connection)
            connection.sendall(msgspec.msgpack.encode(Opened()))
            gc.freeze()  # children share what is there
            children.serve(connection)


if __name__ == "__main__":
    main()
