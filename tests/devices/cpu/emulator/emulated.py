"""The kernels of another architecture in an emulator's process, as the functions of a loaded library."""

import ctypes
import operator
import os
import struct
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path

INTEGERS, FLOATS = 16, 8  # arguments of a call at most
CALL = struct.Struct(f"=64s{INTEGERS}q{FLOATS}f")  # driver.c: Call
RESULT = struct.Struct("=q")


def descriptor() -> int:
    """The descriptor of this process's arena. Raises AttributeError in a process that has none."""
    return ctypes.c_int.in_dll(ctypes.CDLL(None), "arena_descriptor").value


def memory() -> tuple[int, int]:
    """The address and size of the arena."""
    this = ctypes.CDLL(None)
    address = ctypes.c_void_p.in_dll(this, "arena_address").value
    assert address is not None
    return address, ctypes.c_size_t.in_dll(this, "arena_bytes").value


class Function:
    """One function of the library, with the attributes that a function of ctypes has."""

    def __init__(self, functions: "EmulatedFunctions", name: str) -> None:
        self.functions = functions
        self.name = name
        self.restype: object = None
        self.argtypes: Sequence[object] = ()

    def __call__(self, *arguments: object) -> int | None:
        """Raises TypeError where the arguments are not those of the declaration."""
        if len(arguments) != len(self.argtypes):
            raise TypeError(f"{self.name} takes {len(self.argtypes)} arguments, not {len(arguments)}")
        integers, floats = [0] * INTEGERS, [0.0] * FLOATS
        num_integers = num_floats = 0
        for kind, value in zip(self.argtypes, arguments, strict=True):
            if kind is ctypes.c_float:
                floats[num_floats] = value  # type: ignore[call-overload]
                num_floats += 1
            else:
                integers[num_integers] = _integer(value)
                num_integers += 1
        result = self.functions.call(CALL.pack(self.name.encode(), *integers, *floats))
        if self.restype is None:
            return None
        return ctypes.c_int(result).value if self.restype is ctypes.c_int else result


def _integer(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, ctypes.Array | ctypes.Structure):
        return ctypes.addressof(value)
    if hasattr(value, "_obj"):  # of ctypes.byref
        return ctypes.addressof(value._obj)
    return operator.index(value)  # type: ignore[arg-type]


class EmulatedFunctions:
    """The functions of `library` by their names, called one at a time by `command` (the emulator and
    driver.c)."""

    def __init__(self, command: Sequence[str], library: Path) -> None:
        address, size = memory()
        plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        self._process = subprocess.Popen(
            [*command, str(library), str(descriptor()), str(address), str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor(),),
            env=plain,
        )
        self._functions: dict[str, Function] = {}
        self._is_busy = False
        self._is_closed = False
        self._waiting: deque[bytes] = deque()

    def __getattr__(self, name: str) -> Function:
        return self._functions.setdefault(name, Function(self, name))

    def call(self, packed: bytes) -> int:
        """The result of a call. Raises RuntimeError where the emulator has ended. A finalizer that the
        garbage collector runs during another call waits for its end; it has no use for a result."""
        if self._is_closed:
            return 0  # a finalizer at exit: what it frees went with the emulator
        if self._is_busy:
            self._waiting.append(packed)
            return 0
        self._is_busy = True
        try:
            result = self._exchange(packed)
            while self._waiting:
                self._exchange(self._waiting.popleft())
        finally:
            self._is_busy = False
        return result

    def _exchange(self, packed: bytes) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        name = packed[:64].rstrip(b"\0").decode()
        try:
            self._process.stdin.write(packed)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"the emulator ended before {name}: {self._process.wait()}") from None
        answer = self._process.stdout.read(RESULT.size)
        if len(answer) != RESULT.size:
            raise RuntimeError(f"the emulator ended in {name}: {self._process.wait()}")
        return RESULT.unpack(answer)[0]

    def close(self) -> None:
        """Ends the emulator."""
        self._is_closed = True
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
