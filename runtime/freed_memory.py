"""Returns memory that was freed to the system.

The C library keeps what is freed between blocks that are in use: after a tokenizer was read, some 20 MB.
"""

import ctypes


def return_freed_memory() -> bool:
    """Takes milliseconds, so it is for the end of a phase that has freed much. False: nothing was returned,
    or this C library has no call for it (musl)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
