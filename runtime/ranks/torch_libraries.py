"""Loads torch's libraries in a thread, while Python imports modules that need none of them.

    main thread   modules of AHEAD ────────────────►│ import torch: its Python
    a thread      libtorch_cpu.so: 400 MB mapped ──►│ finds its libraries loaded

Loading takes a sixth of what a rank on the CPU needs until it can load a model, nearly all of it in functions
of C++ that register operators, and none of it holds the interpreter. The linker loads one library at a time,
so an extension module that is imported meanwhile waits for torch's: AHEAD imports none that the worker and
BEFORE have not imported.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

# in the order and with the scope of symbols in which `import torch` loads them
LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),
    ("libtorch_cpu.so", os.RTLD_NOW | os.RTLD_LOCAL),
)

# what AHEAD imports that has extension modules
BEFORE = ("_multiprocessing", "grp", "hashlib", "statistics", "unicodedata")

# modules that a rank on the CPU needs and that import no torch; those of other packages torch imports
AHEAD = (
    "runtime.devices.base",
    "runtime.devices.cpu.kernels.library",
    "runtime.layers.sampling.thinking",
    "runtime.models.config.draft_config",
    "runtime.models.config.peft",
    "runtime.ranks.graph_setup",
    "torchgen.model",
    "unittest.mock",
    "multiprocessing.connection",
    "pickletools",
    "tarfile",
    "tqdm",
    "urllib.request",
)


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Has a thread load the libraries meanwhile; it has ended at the end. A library that cannot be loaded is
    what `import torch` reports."""
    folder = None if "torch" in sys.modules else _library_folder()
    if folder is None:
        yield
        return
    for name in BEFORE:
        import_module(name)
    thread = Thread(target=_load, args=(folder,), name="libraries")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def import_ahead() -> None:
    """Imports the modules of AHEAD. One that is missing is what its user reports."""
    for name in AHEAD:
        with suppress(ImportError):
            import_module(name)


def _library_folder() -> Path | None:
    """The folder of torch's libraries; None: there is no torch."""
    spec = find_spec("torch")
    folders = None if spec is None else spec.submodule_search_locations
    return Path(folders[0], "lib") if folders else None


def _load(folder: Path) -> None:
    # a function of ctypes, which leaves the interpreter to others: ctypes.CDLL(path) holds it
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for name, flags in LIBRARIES:
        dlopen(os.fsencode(folder / name), flags)
