"""Prepares images and sounds by transformers' processor of a model, in a process of its own
(transformers_process.py)."""

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from runtime import log
from runtime.errors import InternalFault, InvalidRequest, ModelError
from runtime.media_kind import NAMES
from runtime.messages.media import Media, MediaKind, SoundLimits, TokenGrid
from runtime.messages.packed_arrays import unpack
from runtime.messages.prepare import MAX_MESSAGE_BYTES, PrepareRequest, PrepareResult
from runtime.models.config.transformers_media import TransformersEncoder, placeholder_texts, sampling_rate
from runtime.text.media_prompts import Prepared, check_kind
from runtime.text.position_grids import grids_of
from runtime.text.vocabulary import Vocabulary

LIMIT_S = 120.0  # for one file, the start of the process included
MAX_SOUND_S = 1800.0
_decoder = msgspec.msgpack.Decoder(PrepareResult)


class TransformersProcessor:
    """See MediaProcessor. All tokens of a file take a row. The process starts with the first file, and again
    when it has ended."""

    is_attended = False

    def __init__(
        self,
        folder: Path,
        texts: Mapping[MediaKind, str],
        ids: Mapping[MediaKind, int],
        *,
        has_token_grids: bool = False,
    ) -> None:
        """`texts`, `ids`: the placeholder of each kind; `has_token_grids`: tokens of files have rotary
        positions of frame, row and column."""
        self.placeholder_ids = dict(ids)
        self.sounds = None
        if MediaKind.AUDIO in ids:
            self.sounds = SoundLimits(rate=sampling_rate(folder), max_s=MAX_SOUND_S)
        self._folder, self._texts, self._has_token_grids = folder, dict(texts), has_token_grids
        self._lock = threading.Lock()  # one file at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def prepare(self, media: Media) -> Prepared:
        """See MediaProcessor. Values are packed arrays (packed_arrays.py). Raises InternalFault where the
        process fails."""
        check_kind(media, frozenset(self.placeholder_ids))
        with self._lock:
            result, values = self._asked(media)
        if result.error:
            if result.is_fault:
                raise InternalFault(result.error, param=media.param)
            raise InvalidRequest(f"{media.param}: {result.error}", param=media.param)
        arrays = unpack(values)
        ids: list[int] = arrays["input_ids"].tolist()
        return Prepared(
            kind=media.kind,
            digest=result.digest,
            values=values,
            token_ids=ids,
            positions=np.arange(len(ids), dtype=np.int32),
            token_grids=self._token_grids(media, arrays, result.behind),
        )

    def _token_grids(
        self, media: Media, arrays: Mapping[str, np.ndarray], behind: int
    ) -> tuple[TokenGrid, ...]:
        """The grids of a file's tokens. Raises InternalFault for positions that are in none."""
        if not self._has_token_grids:
            return ()
        try:
            return grids_of(arrays["position_ids"][:, 0], behind)
        except ValueError as error:
            raise InternalFault(
                f"{media.param}: transformers gives its tokens rotary positions that are not supported: "
                f"{error}",
                param=media.param,
            ) from None

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _asked(self, media: Media) -> tuple[PrepareResult, np.ndarray]:
        """The process's answer, and the packed arrays as float32 that are none. Raises InternalFault."""
        connection = self._started()
        request = PrepareRequest(kind=media.kind, shape=media.values.shape, rate=media.rate)
        fd = os.memfd_create("media", os.MFD_CLOEXEC)
        try:
            view = np.ascontiguousarray(media.values).data.cast("B")
            while view:
                view = view[os.write(fd, view) :]
            socket.send_fds(connection, [msgspec.msgpack.encode(request)], [fd])
            data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
        except OSError as error:  # a time-out is one
            data, fds = b"", []
            log.get(__name__).warning("transformers' processor does not answer", why=str(error))
        finally:
            os.close(fd)
        if not data:
            self._end()
            raise InternalFault(
                f"{media.param}: the process of transformers' processor has ended or takes more than "
                f"{LIMIT_S:.0f} s; the server's log may say why",
                param=media.param,
            )
        result = _decoder.decode(data)
        try:
            values = np.empty(0, np.float32)
            if result.num_bytes:
                shared = mmap.mmap(fds[0], result.num_bytes, prot=mmap.PROT_READ)
                values = np.frombuffer(shared, np.float32)
        finally:
            for one in fds:
                os.close(one)
        return result, values

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is None and self._socket is not None:
            return self._socket
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(LIMIT_S)
        arguments = ["--folder", str(self._folder), "--texts", msgspec.json.encode(self._texts).decode()]
        arguments += ["--token-grids"] if self._has_token_grids else []
        module = "runtime.text.transformers_process"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, "--socket", str(theirs.fileno()), *arguments],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._socket = ours
        return ours

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        self._process = self._socket = None


def _environment() -> dict[str, str]:
    """The process's environment: one thread, no network, and this package on its path."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join([*paths, root])}


def placeholders(
    folder: Path, encoder: TransformersEncoder, vocabulary: Vocabulary
) -> tuple[dict[MediaKind, str], dict[MediaKind, int]]:
    """Texts and ids of the tokens that stand for files. Raises ModelError where there are none."""
    texts: dict[MediaKind, str] = {}
    ids: dict[MediaKind, int] = {}
    named = placeholder_texts(folder, encoder, vocabulary.files.special_tokens)
    for kind, row_id in encoder.row_ids:
        known = [(text, id) for text in named[kind] if (id := vocabulary.token_id(text)) is not None]
        text, id = known[0] if known else (vocabulary.decode([row_id]), row_id)
        if not text:
            raise ModelError(
                f"--model-impl transformers: the tokenizer has no token for {NAMES[kind]}; restore "
                "tokenizer.json from the model's source, or set --enable-multimodal false"
            )
        texts[kind], ids[kind] = text, id
    return texts, ids
