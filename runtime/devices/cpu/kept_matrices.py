"""Packed weights kept from one start to the next: KeptWeights of the cpu device (devices/packed.py).

    first start     layers pack matrices, which `add` notes; at the end a thread writes them to a file
    later starts    the file is mapped, and `take` hands its matrices out in the order of packing

The file's name follows from the caller's key, from the code that makes packed weights of checkpoints, and
from the level of the kernels and the layout that they read, so nothing that was packed in another way is ever
found.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from threading import Thread, get_native_id

import torch
from torch import Tensor

import runtime
from runtime import log
from runtime.devices.cpu.kernels.library import Library
from runtime.devices.cpu.matrices import Form, Matrix, Threads
from runtime.devices.cpu.packed_file import (
    DamagedFile,
    contents_of,
    file_bytes,
    matrices_of,
    read_header,
    write,
)
from runtime.devices.cpu.packed_folder import PackedFolder
from runtime.devices.cpu.packed_memory import load_data
from runtime.devices.packed import KeptMismatch

MIN_BYTES = 64 << 20  # of packed weights: fewer are packed as fast as they are found
MOST_GROWTH = 4  # packed bytes for a byte of a checkpoint: 8-bit floats that are computed in float32
LOW_PRIORITY = 10  # nice value of the writer
# code that decides what is packed of a checkpoint, and how: files, and folders with all Python in them
PACKING = (
    "devices/cpu/ggml.py",
    "devices/cpu/latents.py",
    "devices/cpu/matrices.py",
    "devices/cpu/mla.py",
    "devices/cpu/moe.py",
    "devices/cpu/ops.py",
    "devices/cpu/packed_file.py",
    "devices/cpu/quantized.py",
    "devices/cpu/row_quantizer.py",
    "devices/experts.py",
    "devices/packed.py",
    "layers",
    "models",
)
NOT_PACKING = "layers/sampling"


class KeptPackedWeights:
    """The packed weights of one rank that are kept in files. See KeptWeights and KeptMatrices; used by the
    rank's main thread alone."""

    def __init__(self, threads: Threads, folder: PackedFolder) -> None:
        self.threads = threads
        self.folder = folder
        self.key = ""
        self.writes = False
        self.kept: list[tuple[Form, Matrix]] | None = None  # those of a file, the next one last
        self.added: list[tuple[Form, Matrix]] = []
        self.storages: set[int] = set()
        self.writer: Thread | None = None  # of the latest file
        self.log = log.get("start")

    def keeps(self, num_bytes: int) -> bool:
        """See KeptWeights.keeps."""
        return num_bytes * MOST_GROWTH >= MIN_BYTES

    def open(self, key: str, *, writes: bool) -> frozenset[str]:
        """See KeptWeights.open."""
        program = program_digest(self.threads.library)
        self.key = blake2b(f"{key} {program}".encode(), digest_size=20).hexdigest()
        self.writes, self.kept = writes, None
        self.added, self.storages = [], set()
        names = self._read()
        self.threads.kept = self
        return names

    def _read(self) -> frozenset[str]:
        """Maps the key's file, if there is one."""
        path = self.folder.path(self.key)
        try:
            with self.folder.open(self.key) as fd:
                if fd is None:
                    return frozenset()
                header = read_header(fd, self.key)
                data, is_mapped = load_data(fd, header, self.threads)
                matrices = matrices_of(header.contents, data, self.threads.library)
        except DamagedFile as error:
            self.log.warning(
                "packed weights are damaged, and are packed again", file=str(path), why=str(error)
            )
            self.discard()
            return frozenset()
        except OSError as error:
            self.log.warning("packed weights cannot be read", file=str(path), why=str(error))
            self.writes = False
            return frozenset()
        self.folder.touch(self.key)
        self.log.info("packed weights found", file=str(path), bytes=data.nbytes, mapped=is_mapped)
        forms = [stored.form for stored in header.contents.matrices]
        self.kept = list(zip(forms, matrices, strict=True))[::-1]
        return frozenset(header.contents.names)

    def take(self, form: Form) -> Matrix | None:
        """See KeptMatrices.take."""
        if self.kept is None:
            return None
        if not self.kept or self.kept[-1][0] != form:
            raise KeptMismatch(f"no {form} is kept")
        return self.kept.pop()[1]

    def add(self, form: Form, matrix: Matrix, sources: Sequence[Tensor]) -> None:
        """See KeptMatrices.add."""
        if self.writes:
            self.added.append((form, matrix))
            self.storages.update(source.untyped_storage().data_ptr() for source in sources)

    @property
    def packed_storages(self) -> frozenset[int]:
        """See KeptWeights.packed_storages."""
        return frozenset(self.storages)

    def close(self, names: Iterable[str] | None) -> None:
        """See KeptWeights.close. A thread writes what was packed."""
        self.threads.kept = None
        added, self.added, kept, self.kept = self.added, [], self.kept, None
        if kept:
            raise KeptMismatch(f"{len(kept)} matrices are kept that no layer asks for")
        if names is None or not added or sum(matrix.num_bytes for _, matrix in added) < MIN_BYTES:
            return
        arguments = (self.key, list(names), added)
        self.writer = Thread(target=self._write, args=arguments, name="packed weights", daemon=True)
        self.writer.start()

    def _write(self, key: str, names: list[str], added: list[tuple[Form, Matrix]]) -> None:
        os.setpriority(os.PRIO_PROCESS, get_native_id(), LOW_PRIORITY)  # of this thread alone
        contents = contents_of(key, names, added)
        matrices = [matrix for _, matrix in added]
        path = str(self.folder.path(key))
        try:
            why = self.folder.write(
                key, file_bytes(contents), lambda fd: write(fd, contents, matrices, self.threads.library)
            )
        except OSError as error:
            why = str(error)
        if why:
            self.log.warning(
                "packed weights are not kept: the next start packs them again", file=path, why=why
            )
        else:
            self.log.info("packed weights are kept", file=path, bytes=file_bytes(contents))

    def discard(self) -> None:
        """See KeptWeights.discard."""
        self.threads.kept, self.kept = None, None
        try:
            self.folder.remove(self.key)
        except OSError as error:
            self.log.warning("packed weights cannot be removed", why=str(error))


@cache
def program_digest(library: Library, root: Path = Path(runtime.__file__).parent) -> str:
    """A digest of all that decides how weights are packed: code below `root`, the level of the kernels and
    the layout that they were built for, torch, which rounds some weights. Raises FileNotFoundError where a
    file of PACKING is missing."""
    known = f"{torch.__version__} {library.level.machine} {library.level.name} {library.packing}"
    digest = blake2b(known.encode(), digest_size=20)
    for path in packing_sources(root):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def packing_sources(root: Path) -> list[Path]:
    """The files of Python code below `root` that decide what is packed."""
    found = [
        path
        for name in PACKING
        for path in (sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / name])
    ]
    return [path for path in found if not path.is_relative_to(root / NOT_PACKING)]
