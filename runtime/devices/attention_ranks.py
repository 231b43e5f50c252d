"""The ranks among which attention is divided, where these are not all ranks of a stage. Torch-free at run
time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.messages.attention_layout import AttentionLayout

if TYPE_CHECKING:
    from runtime.devices.base import Collectives


@dataclass(frozen=True, slots=True)
class AttentionRanks:
    """One rank's collectives (devices/base.py) with some of the ranks of its stage."""

    layout: AttentionLayout
    heads: "Collectives"  # that share the heads of the same tokens
    parts: "Collectives"  # that have the same heads of other parts of the same sequences
    group: "Collectives"  # that have the same requests
    peers: "Collectives"  # at the same place of each group
    has_own_head: bool = False  # each group has a language model head of its own

    @property
    def index(self) -> int:
        """This rank's group."""
        return self.peers.rank
