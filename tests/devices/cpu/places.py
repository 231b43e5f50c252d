"""Places among ranks without ranks."""

from runtime.devices.single_rank import SingleRank


class Ranks(SingleRank):
    """A place among ranks, for shares only."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
