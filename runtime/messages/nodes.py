"""Messages between node 0, which has the event loop, and each other node, which has ranks only.

    node ──► node 0   Hello, then for the ranks of each generation: RendezvousOpened, FromNodeRank ..., Exited
    node 0 ──► node   Welcome or Refused, then for each generation: Begin, ToNodeRanks ..., SignalRank, End

A node has a link for each replica of which it has ranks, and generations are those of that replica. Either
side may send Bye before it ends. What ranks read and send is passed on as it lies in their rings.
"""

from msgspec import Struct

from runtime.messages.ranks import StartRank


class Identity(Struct, frozen=True, array_like=True):
    """What must be equal on all nodes."""

    version: str  # of this package
    byte_order: str  # little or big: arrays in messages have the machine's
    num_nodes: int
    device: str
    options: dict[str, str]  # by name: those that were given and must agree
    checkpoint: str  # a digest of the checkpoint's files (nodes/identity.py)


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a node."""

    node: int  # from 1
    identity: Identity
    replica: int = 0  # whose ranks this link is for


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """Node 0 takes the node. `model_path` is the folder of the model on node 0."""

    model_path: str


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """Node 0 does not take the node. `is_final`: it need not try again before its options were changed."""

    reason: str
    is_final: bool


class Begin(Struct, frozen=True, array_like=True, tag="begin"):
    """Start the node's ranks of a generation, and have them load the model. `opens_rendezvous`: ranks of
    several nodes meet on this one; RendezvousOpened says where, for the others."""

    generation: int
    start: StartRank
    opens_rendezvous: bool = False


class RendezvousOpened(Struct, frozen=True, array_like=True, tag="rendezvous"):
    """Where the ranks of a generation meet: StartRank.rendezvous."""

    generation: int
    rendezvous: str


class ToNodeRanks(Struct, frozen=True, array_like=True, tag="to_ranks"):
    """A record for the ring that all ranks of the node read."""

    generation: int
    body: bytes


class SignalRank(Struct, frozen=True, array_like=True, tag="signal"):
    """Send a signal to the process of a rank; nothing where it has ended."""

    generation: int
    rank: int
    number: int


class End(Struct, frozen=True, array_like=True, tag="end"):
    """Nothing more comes for this generation: end what is left of it."""

    generation: int


class FromNodeRank(Struct, frozen=True, array_like=True, tag="from_rank"):
    """A record that a rank has written to its ring."""

    generation: int
    rank: int
    body: bytearray


class Exited(Struct, frozen=True, array_like=True, tag="exited"):
    """The process of a rank has ended. `reason`: why it could not be started; empty: it was."""

    generation: int
    rank: int
    exit_code: int
    reason: str = ""


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The sender ends in order. `is_failure`: because it cannot go on."""

    is_failure: bool


FromNode0 = Welcome | Refused | Begin | ToNodeRanks | SignalRank | End | Bye
FromNode = Hello | RendezvousOpened | FromNodeRank | Exited | Bye
