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
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.utils import is_torchvision_available

from runtime import log
from runtime.media_kind import MediaKind
from runtime.messages.packed_arrays import pack
from runtime.messages.prepare import MAX_MESSAGE_BYTES, PrepareRequest, PrepareResult

NICENESS = 10  # the process leaves the cores to the event loop and the ranks
INPUTS = {MediaKind.IMAGE: "images", MediaKind.AUDIO: "audio"}  # arguments of processors
# what processors give besides, which says nothing of a file
OTHERS = ("attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
FAILURES = (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError)


class Preparer:
    """A processor, and the model's positions of what it makes."""

    def __init__(self, processor: Any, rope_index: Any) -> None:
        """`rope_index`: get_rope_index of the model; None: its tokens have a position each."""
        self.processor, self._rope_index = processor, rope_index

    def positions(self, found: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], int]:
        """Rotary positions of the tokens that the processor made, [3, 1, tokens], by the name that models
        have for them, and the position of what follows."""
        if self._rope_index is None:
            return {}, 0
        ids, types = found["input_ids"], found["mm_token_type_ids"]
        text = ids.new_zeros(1, 1)  # one token before the file, and one behind it
        inputs = {name: value for name, value in found.items() if name.endswith("_grid_thw")}
        positions, _ = self._rope_index(
            torch.cat([text, ids, text], dim=1),
            mm_token_type_ids=torch.cat([torch.zeros_like(text), types, torch.zeros_like(text)], dim=1),
            **inputs,
        )
        numbers = (positions - positions[0, 0, 0] - 1).numpy()
        return {"position_ids": np.ascontiguousarray(numbers[:, :, 1:-1])}, int(numbers[0, 0, -1])


def serve(
    connection: socket.socket, folder: str, texts: Mapping[MediaKind, str], *, has_token_grids: bool
) -> None:
    """Answers requests until the parent closes the socket. `texts`: the placeholder of each kind;
    `has_token_grids`: tokens of files have rotary positions of three numbers."""
    processor, why = None, ""
    decoder = msgspec.msgpack.Decoder(PrepareRequest)
    while True:
        data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
        if not data:
            return
        if processor is None and not why:
            processor, why = _open(folder, has_token_grids)
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


def _open(folder: str, has_token_grids: bool) -> tuple[Preparer | None, str]:
    """What prepares files, or why there is nothing."""
    try:
        if not is_torchvision_available():
            leave_out_videos()
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return Preparer(processor, _rope_index(folder) if has_token_grids else None), ""
    except FAILURES as error:
        log.write_stack()
        return None, f"transformers' processor of the model does not open: {str(error)[:800]}"


def leave_out_videos() -> None:
    """Has processors open without their part for videos, which needs torchvision."""
    attributes = ProcessorMixin.get_attributes.__func__  # type: ignore[attr-defined]

    def others(cls: type[ProcessorMixin]) -> list[str]:
        return [name for name in attributes(cls) if name != "video_processor"]

    ProcessorMixin.get_attributes = classmethod(others)  # type: ignore[assignment]


def _rope_index(folder: str) -> Any:
    """get_rope_index of the model in a folder, which has no weights. Raises AttributeError where it has
    none."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])._from_config(config)
    return next(one for one in model.modules() if hasattr(one, "get_rope_index")).get_rope_index


def _values(request: PrepareRequest, fd: int) -> np.ndarray:
    dtype = np.dtype(np.float32 if request.kind is MediaKind.AUDIO else np.uint8)
    size = os.fstat(fd).st_size
    return np.frombuffer(mmap.mmap(fd, size, prot=mmap.PROT_READ), dtype).reshape(request.shape)


def _prepared(
    preparer: Preparer, request: PrepareRequest, values: np.ndarray, text: str
) -> tuple[PrepareResult, bytes]:
    """What the processor makes of one file whose placeholder is the whole text."""
    more: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": False}
    if request.kind is MediaKind.IMAGE:
        file: Any = Image.fromarray(values[0])
    else:
        file, more["sampling_rate"] = values, int(request.rate)
    try:
        found = preparer.processor(text=[text], **{INPUTS[request.kind]: [file]}, **more)
        arrays, behind = preparer.positions(found)
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
    except FAILURES as error:
        log.write_stack()
        return PrepareResult(error=f"transformers' processor refuses it: {str(error)[:800]}"), b""
    return PrepareResult(num_bytes=len(packed), digest=sha256(packed).digest(), behind=behind), packed


def main() -> None:
    """Runs the process."""
    parser = argparse.ArgumentParser(
        prog="runtime.text.transformers_process",
        description="Prepares images and sounds by transformers; started by the runtime, not by hand.",
    )
    parser.add_argument("--socket", type=int, required=True, help="descriptor")
    parser.add_argument("--folder", required=True, help="of the model")
    parser.add_argument("--texts", required=True, help="placeholder by kind, as JSON")
    parser.add_argument("--token-grids", action="store_true", help="positions of three numbers a token")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    os.nice(NICENESS)
    with socket.socket(fileno=arguments.socket) as connection:
        texts = msgspec.json.decode(arguments.texts, type=dict[MediaKind, str])
        serve(connection, arguments.folder, texts, has_token_grids=arguments.token_grids)


if __name__ == "__main__":
    main()
