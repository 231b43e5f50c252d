"""Work on a second stream of the device, beside what the first one is given meanwhile.

    main      ... x | router, routed experts ......... | sum ...
    second          | shared experts of the same x |---^ waits for it

Memory needs no more than the two waits: what the second stream reads is held until the main one has waited
for it, and what it makes comes from its own part of the pool, where the next work begins behind the main
stream. Both are events, so a capture takes them in.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class SideStream:
    """The second stream of one rank. `streams`: torch's module of the device (Device.streams)."""

    def __init__(self, streams: Any) -> None:
        self.streams = streams
        self.stream = streams.Stream()

    def begin(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Launches the work, and returns what gives its result to the stream that is current now, which then
        waits for it."""
        main = self.streams.current_stream()
        self.stream.wait_stream(main)
        with self.streams.stream(self.stream):
            found = work()

        def joined() -> Tensor:
            main.wait_stream(self.stream)
            return found

        return joined
