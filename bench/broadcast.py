"""What a plan costs when more ranks read it: CPU time of the event loop to encode a decode of 64 sequences
and put it into the ring, with 1, 2, 4 and 8 readers. The readers are ends of the ring in this process, which
take each message before the next is sent, so no scheduling of processes is in the figures.

    python -m bench.broadcast [--rounds 30]
"""

import argparse
import time
from statistics import median

from bench.nodes import ROWS, plan_of
from bench.record import record
from runtime.messages.codec import Wire
from runtime.messages.ranks import ToRank
from runtime.ranks import ring

STEPS = 1000  # of each round
READERS = (1, 2, 4, 8)


class Measured:
    """A ring with some readers, and its figures."""

    def __init__(self, num_readers: int) -> None:
        self.num_readers = num_readers
        self.publish_us: list[float] = []  # of each round: encoding and publishing a plan
        self.read_us: list[float] = []  # taking it, in one reader
        self._fds = ring.create(num_readers=num_readers)
        self._writer = ring.Writer(self._fds, 1)
        self._readers = [ring.Reader(self._fds.for_reader(i), 1) for i in range(num_readers)]
        self._wire = Wire[ToRank](ToRank)

    def round(self) -> None:
        """STEPS plans, one after the other."""
        publish_ns = read_ns = 0
        for step in range(STEPS):
            begin = time.thread_time_ns()
            assert self._writer.try_publish(self._wire.encode(plan_of(step))), "the readers have read"
            middle = time.thread_time_ns()
            for reader in self._readers:
                while reader.read_nowait() is not None:
                    pass
            read_ns += time.thread_time_ns() - middle
            self._writer.collect()
            publish_ns += middle - begin
        self.publish_us.append(publish_ns / STEPS / 1e3)
        self.read_us.append(read_ns / STEPS / self.num_readers / 1e3)

    def close(self) -> None:
        """Closes the ring."""
        for reader in self._readers:
            reader.close()
        self._writer.close()
        self._fds.close()


def main() -> None:
    """Runs the bench, prints its figures and records them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    rings = [Measured(count) for count in READERS]
    for _ in range(args.rounds):
        for each in rings:
            each.round()
    rows = [
        {
            "ranks": each.num_readers,
            "publish_us": round(median(each.publish_us), 2),
            "of_one": round(
                median(a / b for a, b in zip(each.publish_us, rings[0].publish_us, strict=True)), 2
            ),
            "read_us": round(median(each.read_us), 2),
        }
        for each in rings
    ]
    for row in rows:
        print(row)
    for each in rings:
        each.close()
    record("broadcast", {"rows": ROWS, "runs": rows})


if __name__ == "__main__":
    main()
