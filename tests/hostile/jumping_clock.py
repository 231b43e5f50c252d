"""`runtime serve` with a wall clock that another process sets while it runs.

    python -m tests.hostile.jumping_clock FILE serve ...

Every call of `time.time` and `time.time_ns` in the server's process is ahead of the machine's clock by the
seconds in FILE, a double that is mapped into memory. `datetime.now`, which the server uses for what people
read (names of files, lines of logs, templates), and the ranks follow the machine. The machine's own clock
cannot be set without being its administrator, and would jump for all its processes.
"""

import mmap
import struct
import sys
import time
from pathlib import Path

_DOUBLE = struct.Struct("d")


class JumpingClock:
    """The file by which a server's clock is set."""

    def __init__(self, path: Path) -> None:
        """Creates the file, with a clock that is right."""
        self.path = path
        path.write_bytes(_DOUBLE.pack(0.0))

    def set_ahead(self, seconds: float) -> None:
        """Sets the clock ahead of the machine's, or behind it."""
        with self.path.open("r+b") as file:
            file.write(_DOUBLE.pack(seconds))


def follow(path: Path) -> None:
    """Has `time.time` and `time.time_ns` of this process follow the file. To be called before modules take
    these functions by name."""
    with path.open("rb") as file:
        ahead = mmap.mmap(file.fileno(), _DOUBLE.size, prot=mmap.PROT_READ)
    machine_s, machine_ns = time.time, time.time_ns

    def ahead_s() -> float:
        return _DOUBLE.unpack_from(ahead)[0]

    time.time = lambda: machine_s() + ahead_s()
    time.time_ns = lambda: machine_ns() + int(ahead_s() * 1e9)


def main() -> int:
    """Runs the command line behind FILE. -> exit code"""
    follow(Path(sys.argv[1]))
    sys.argv[:2] = ["runtime"]
    from runtime.cli import main as run  # takes the functions of the clock by name

    return run()


if __name__ == "__main__":
    sys.exit(main())
