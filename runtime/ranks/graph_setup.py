"""What may be captured on a rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.messages.ranks import StartRank
from runtime.messages.speculation import Speculation


@dataclass(frozen=True, slots=True)
class GraphSetup:
    """The captures that the scheduler may ask for, and what they compute with."""

    sizes: Sequence[int] = ()  # numbers of sequences for which decode steps may be captured
    piecewise_sizes: Sequence[int] = ()  # numbers of tokens for which piecewise graphs may be captured
    pads: bool = True  # a graph may serve fewer sequences than it has rows
    speculation: Speculation | None = None  # None: no steps verify drafts
    compiled_rows: int = 0  # decode steps of up to so many sequences run compiled functions
    compiles_piecewise: bool = False  # piecewise graphs run compiled functions

    @classmethod
    def of(cls, start: StartRank) -> "GraphSetup":
        """The captures of a rank that is started with `start`."""
        return cls(
            start.graph_sizes,
            start.piecewise_sizes,
            start.graph_pads,
            start.speculation,
            start.compiled.max_rows,
            start.compiled.is_piecewise,
        )


NO_GRAPHS = GraphSetup()
