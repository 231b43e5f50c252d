"""What runs through torch.compile on the ranks. Torch-free."""

from msgspec import Struct


class Compiled(Struct, frozen=True, array_like=True):
    """Of the steps that are captured."""

    max_rows: int = 0  # most sequences of a decode step that does
    has_pieces: bool = False  # steps in pieces do
    explains: bool = False  # on stderr

    @property
    def is_wanted(self) -> bool:
        return self.has_pieces or self.max_rows > 0
