"""The preparation process: `python -m runtime.preparation.process`, started by preparer.py when the first
file comes.

It forks a child for each file, which opens the model's processor and prepares the file. A child has no
tokenizer: it asks the server for the few tokens that stand among those of a file.
"""

import argparse
import gc
import importlib
import mmap
import os
import socket
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer, models

from runtime.errors import InvalidRequest, RequestError
from runtime.media import forks
from runtime.messages.media import Media
from runtime.preparation.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Done,
    FileHead,
    FromChild,
    PrepareFile,
    PrepareSetup,
    Question,
    Refused,
)
from runtime.preparation.packed import write_prepared
from runtime.text.open_media import open_processor
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary

BOUNDS = forks.Bounds(limit_s=120.0, cpu_s=60, memory_bytes=4 << 30, file_bytes=1 << 30)
_LIBRARIES = (  # that processors of images are opened with; without Pillow there are none
    "gemma_image_processor",
    "image_openers",
    "image_processor",
    "naflex_images",
    "omni_processor",
    "onevision_processor",
    "patch_image_processor",
    "row_image_processor",
    "tile_image_processor",
)
_file_decoder = msgspec.msgpack.Decoder(PrepareFile)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


class AskedVocabulary(Vocabulary):
    """The server's tokenizer, as far as processors of files need one."""

    def __init__(self, setup: PrepareSetup, request: PrepareFile, server: socket.socket) -> None:
        super().__init__(Tokenizer(models.BPE()), TokenizerFiles())
        self.files = TokenizerFiles(special_tokens=dict(setup.special_tokens))
        self._known, self._server = dict(request.known), server

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
            self._known[question] = _answer_decoder.decode(self._server.recv(MAX_MESSAGE_BYTES))
        return self._known[question]


def _run_child(setup: PrepareSetup, data: bytes, fds: list[int]) -> None:
    """The whole work of a child."""
    request, (reply, *arrays) = _file_decoder.decode(data), fds
    with socket.socket(fileno=reply) as server:
        memory: list[int] = []
        result: FromChild
        try:
            forks.confine(BOUNDS)
            forks.end_with(reply, is_written_to=True)
            fd, head_at = _prepared(setup, request, arrays, server)
            memory, result = [fd], Done(head_at)
        except RequestError as error:
            result = Refused(error.message, error.param)
        except MemoryError:
            message = f"{request.file.param}: the file takes too much memory when it is prepared"
            result = Refused(f"{message}; send a smaller one", request.file.param)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            message = f"{request.file.param} could not be prepared; the server's log has the details"
            result = Refused(message, request.file.param, is_fault=True)
        with suppress(OSError):  # the request may have ended
            socket.send_fds(server, [msgspec.msgpack.encode(result)], memory)


def _prepared(
    setup: PrepareSetup, request: PrepareFile, arrays: list[int], server: socket.socket
) -> tuple[int, int]:
    """Memory with the file as the encoder takes it; see write_prepared. Raises InvalidRequest."""
    vocabulary = AskedVocabulary(setup, request, server)
    processor = open_processor(Path(setup.folder), setup.media_config, vocabulary, setup.pixels)
    assert processor is not None, "an encoder has a processor"
    sound = None if request.sound is None else _media(request.sound, arrays[1])
    media = msgspec.structs.replace(_media(request.file, arrays[0]), sound=sound)
    return write_prepared(processor.prepare(media))


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
    for name in _LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(f"runtime.text.{name}")
    gc.freeze()  # children share what is there
    with socket.socket(fileno=arguments.socket) as connection:
        if data := connection.recv(MAX_MESSAGE_BYTES):
            setup = msgspec.msgpack.decode(data, type=PrepareSetup)
            forks.serve(connection, MAX_MESSAGE_BYTES, partial(_run_child, setup))


if __name__ == "__main__":
    main()
