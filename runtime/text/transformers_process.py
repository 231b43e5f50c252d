"""The process that runs transformers' processor of a model: `python -m runtime.text.transformers_process`,
started by transformers_processor.py when the first image or sound comes.

It is given decoded files, one after the other, and answers with the tokens and arrays of each. So the event
loop never imports torch. It ends when its parent closes the socket.
"""

import argparse
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor

from runtime.media_kind import MediaKind
from runtime.messages.packed_arrays import pack
from runtime.messages.prepare import MAX_MESSAGE_BYTES, PrepareRequest, PrepareResult

INPUTS = {MediaKind.IMAGE: "images", MediaKind.AUDIO: "audio"}  # arguments of processors
# what processors give besides, which says nothing of a file
OTHERS = ("attention_mask", "token_type_ids", "mm_token_type_ids", "labels")


def serve(connection: socket.socket, folder: str, texts: Mapping[MediaKind, str]) -> None:
    """Answers requests until the parent closes the socket. `texts`: the placeholder of each kind."""
    processor, why = None, ""
    decoder = msgspec.msgpack.Decoder(PrepareRequest)
    while True:
        data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
        if not data:
            return
        if processor is None and not why:
            processor, why = _open(folder)
        request = decoder.decode(data)
        values = _values(request, fds[0])
        os.close(fds[0])
        if processor is None:
            result, packed = PrepareResult(error=why, is_fault=True), b""
        else:
            result, packed = _prepared(processor, request, values, texts[request.kind])
        fd = os.memfd_create("prepared", os.MFD_CLOEXEC)
        view = memoryview(packed)
        while view:
            view = view[os.write(fd, view) :]
        socket.send_fds(connection, [msgspec.msgpack.encode(result)], [fd])
        os.close(fd)


def _open(folder: str) -> tuple[Any, str]:
    """The processor, or why there is none."""
    try:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True), ""
    except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        traceback.print_exc(file=sys.stderr)
        return None, f"transformers' processor of the model does not open: {str(error)[:800]}"


def _values(request: PrepareRequest, fd: int) -> np.ndarray:
    dtype = np.dtype(np.float32 if request.kind is MediaKind.AUDIO else np.uint8)
    size = os.fstat(fd).st_size
    return np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), dtype).reshape(request.shape)


def _prepared(
    processor: Any, request: PrepareRequest, values: np.ndarray, text: str
) -> tuple[PrepareResult, bytes]:
    """What the processor makes of one file whose placeholder is the whole text."""
    more: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": False}
    if request.kind is MediaKind.IMAGE:
        file: Any = Image.fromarray(values[0])
    else:
        file, more["sampling_rate"] = values, int(request.rate)
    try:
        found = processor(text=[text], **{INPUTS[request.kind]: [file]}, **more)
        arrays = {}
        for name, value in found.items():
            if name in OTHERS:
                continue
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} is no tensor, which is not supported")
            arrays[name] = value.contiguous().numpy()
        if arrays["input_ids"].shape[0] != 1:
            raise ValueError("it makes several texts of one")
        arrays["input_ids"] = arrays["input_ids"][0].astype(np.int64)
        packed = pack(arrays)
    except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        traceback.print_exc(file=sys.stderr)
        return PrepareResult(error=f"transformers' processor refuses it: {str(error)[:800]}"), b""
    return PrepareResult(num_bytes=len(packed), digest=sha256(packed).digest()), packed


def main() -> None:
    """Runs the process."""
    parser = argparse.ArgumentParser(
        prog="runtime.text.transformers_process",
        description="Prepares images and sounds by transformers; started by the runtime, not by hand.",
    )
    parser.add_argument("--socket", type=int, required=True, help="descriptor")
    parser.add_argument("--folder", required=True, help="of the model")
    parser.add_argument("--texts", required=True, help="placeholder by kind, as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with socket.socket(fileno=arguments.socket) as connection:
        texts = msgspec.json.decode(arguments.texts, type=dict[MediaKind, str])
        serve(connection, arguments.folder, texts)


if __name__ == "__main__":
    main()
