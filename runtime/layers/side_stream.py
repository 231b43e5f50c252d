"""Work on a second stream of the device, at the same time as the work on the main stream.

    main stream    ... x | router, routed experts ......... | sum ...
    side stream          | shared experts of the same x |---^ the main stream waits for it

Memory is safe with the two waits alone: what the side stream reads is kept until the main stream has waited
for it, and what it makes comes from its own part of the allocator's pool, where the next work begins behind
the main stream. Both waits are events, so a captured graph contains them.
"""

from collections.abc import Callable

from torch import Tensor

from runtime.devices.streams import Streams


class SideStream:
    """The second stream of one rank."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.stream = streams.Stream()

    def launch(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Launches the work on the side stream. -> what makes the stream that is current now wait for it and
        returns its result."""
        main = self.streams.current_stream()
        self.stream.wait_stream(main)
        with self.streams.stream(self.stream):
            out = work()

        def joined() -> Tensor:
            main.wait_stream(self.stream)
            return out

        return joined
