"""Golden traces: the operators that some work calls, as text in git, so that a change of calls is seen in
review.

    with recorded() as trace:
        model(batch)
    compare("llama-decode", trace.text())

A line is an operator with its arguments, `bf16[7,64]` for a tensor; one in FRACTAL_NZ ends in `nz`, one that
is not contiguous in `~`, one on the host begins with `host`. Lists on the host are shown as they are. Views
and allocations, which launch nothing, are omitted, and lines that repeat, layer after layer, are written
once. Where a trace differs the test shows the difference; WRITE_GOLDEN=1 in its environment writes the file.
"""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.ascend.emulate import device
from tests.ascend.emulate.memory import NZ, format_of, host

FOLDER = Path(__file__).resolve().parent / "golden"
SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}


def described(value: Any) -> str:
    """A value as a trace shows it."""
    if isinstance(value, Tensor):
        where = "" if value.device.type == "npu" else "host "
        form = ("nz" if format_of(host(value)) == NZ else "") + ("" if value.is_contiguous() else "~")
        return f"{where}{SHORT.get(value.dtype, value.dtype)}[{','.join(map(str, value.shape))}]{form}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(described, value))}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, torch.device):
        return value.type  # without the rank
    if isinstance(value, torch.dtype):
        return SHORT.get(value, str(value))
    return f"'{value}'" if isinstance(value, str) else str(value)


class Trace:
    """Calls in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds a call."""
        arguments = [described(value) for value in args]
        arguments += [
            f"{key}={described(value)}"
            for key, value in kwargs.items()
            if value is not None and key not in ("layout", "pin_memory")
        ]
        self.lines.append(f"{name.replace('::', '.')}({', '.join(arguments)})")

    def text(self) -> str:
        """The trace, repeated lines written once."""
        return "\n".join(folded(self.lines)) + "\n"


def folded(lines: list[str]) -> list[str]:
    """Runs of repeated lines, the longest first at each place, written once."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        size, times = repeat(lines, at)
        if times < 2:
            out.append(lines[at])
            at += 1
            continue
        out += [f"{times} times:", *("    " + line for line in folded(lines[at : at + size]))]
        at += size * times
    return out


def repeat(lines: list[str], at: int) -> tuple[int, int]:
    """The size and count of the run that begins here and covers most."""
    best = (1, 1)
    for size in range(1, (len(lines) - at) // 2 + 1):
        block, times = lines[at : at + size], 1
        while lines[at + size * times : at + size * (times + 1)] == block:
            times += 1
        if times > 1 and size * times > best[0] * best[1]:
            best = (size, times)
    return best


@contextmanager
def recorded() -> Iterator[Trace]:
    """Records the calls within the block."""
    trace = Trace()
    device.watchers.append(trace.add)
    try:
        yield trace
    finally:
        device.watchers.remove(trace.add)


def compare(name: str, text: str) -> None:
    """Fails where the text is not that of the golden file."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    golden = path.read_text() if path.exists() else ""
    changes = "\n".join(
        difflib.unified_diff(golden.splitlines(), text.splitlines(), str(path.name), "now", lineterm="", n=2)
    )
    assert not changes, (
        f"the calls are not those of {path.name}; WRITE_GOLDEN=1 keeps the new ones:\n{changes}"
    )
