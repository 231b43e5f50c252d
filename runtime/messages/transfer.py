"""Messages of page transfers, from the server that computes a prompt to the one that computes its answer
(runtime/transfer/).

    decode server ── Ask ─────────────────────────────────────────► prefill server
                  ◄── Found ── Pages, bytes ── Waiting ── First ── Pages, bytes … ── End ──
                  ◄── Refused ──

Pages that a step is about to compute come in sections, each as soon as its layers are computed:

                  ◄── Parts, bytes ── Parts, bytes … ──

Where the decode server can read the other's memory (transfer/transports.py), no bytes follow:

                  ◄── Found with Memory ── PagesAt ──
                  ── Taken ──►
                  ◄── Held ── PagesAt ──
"""

from typing import Literal

from msgspec import Struct

ROOMS = 2**63  # ids of rooms are below it


class Transfer(Struct, frozen=True, array_like=True):
    """The half of a request that a server computes. Both halves carry the same room, an id that their router
    made up."""

    room: int
    source: str = ""  # HOST:PORT of the server that computes the prompt; "": this one does
    proof: bytes = b""  # that it comes from a router with the key (transfer/key.py)
    # of a request whose body names the room, as SGLang's router has it: the bearer token that came with it,
    # which must be the key. The server's own mode says which half it is
    bearer: bytes | None = None


class Role(Struct, frozen=True):
    """What a server does for a router of pairs."""

    mode: Literal["prefill", "decode"]
    bootstrap_port: int | None = None  # at which pages can be asked for; None: nowhere


class PageLayout(Struct, frozen=True, array_like=True):
    """How a page's bytes are divided. A part is a layer's keys or values of a page's tokens on one rank:
    [page_size, bytes of a token], row by row."""

    page_size: int  # tokens
    num_ranks: int  # of a stage that send their parts: those that have different heads
    parts: tuple[tuple[int, ...], ...]  # bytes of the parts of one rank, for each stage of the pipeline
    state_bytes: tuple[int, ...] = ()  # of a state of recurrent layers, on each rank

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on the way."""
        return self.num_ranks * sum(sum(stage) for stage in self.parts)


class Ask(Struct, frozen=True, array_like=True, tag=True):
    """Pages `first`, `first` + 1, ... of the prompt of a room, counted from 0."""

    room: int
    identity: bytes  # of the model and of everything else that decides a page's bytes
    first: int
    keys: bytes  # of these pages, KEY_BYTES each
    num_there: int = 0  # of them, the first ones: they are there already, and lack a state behind them
    transport: str = "tcp"  # by which the asking server would read the other's memory; tcp: it does not
    wants_first: bool = False  # First may come as well


class RankMemory(Struct, frozen=True, array_like=True):
    """Host memory of a rank, in which another server reads (devices/host_memory.py)."""

    num_pages: int
    part_bytes: tuple[int, ...]
    layout: str
    address: int = 0  # of its first byte, where the transport reads by addresses


class Memory(Struct, frozen=True, array_like=True):
    """Host memory of a server, in which another one reads."""

    name: bytes  # by which the transport finds the server; empty: descriptors of the memory follow
    ranks: tuple[RankMemory, ...]  # that have parts of a page each, in the order of the parts
    states: tuple[RankMemory, ...] = ()  # of states of recurrent layers, in the order of ranks


class Found(Struct, frozen=True, array_like=True, tag=True):
    """The room is there; its pages come in this layout. They are read from `memory`; None: they are sent."""

    layout: PageLayout
    memory: Memory | None = None


class Pages(Struct, frozen=True, array_like=True, tag=True):
    """Behind this message come the bytes of so many pages, each stage by stage, in it rank by rank, and of a
    rank part by part; and behind these, Sum."""

    count: int


class First(Struct, frozen=True, array_like=True, tag=True):
    """The first token of the answer, which the server that computed the prompt has sampled. It comes before
    the pages of the prompt's last chunk."""

    token_id: int
    # where the request asks for them: log probabilities of it, of the most probable tokens, and of those that
    # the request names
    logprob: float | None = None
    top: list[tuple[int, float]] = []
    picked: list[tuple[int, float]] = []


class Section(Struct, frozen=True, array_like=True):
    """Parts `first` to `end`, which is not one of them, on each rank of a stage."""

    stage: int
    first: int
    end: int


class Parts(Struct, frozen=True, array_like=True, tag=True):
    """Behind this message come the bytes of a section of so many pages, page by page, in it rank by rank, and
    of a rank part by part; and behind these, Sum. Sections of a stage come in their order, and the pages are
    there with the last one."""

    count: int
    section: Section


class Dropped(Struct, frozen=True, array_like=True, tag=True):
    """The pages whose sections came last will not be whole."""


class State(Struct, frozen=True, array_like=True, tag=True):
    """Behind this message come the bytes of the state that recurrent layers have after the first `depth`
    pages of the prompt, rank by rank; and behind these, Sum. It comes behind all pages."""

    depth: int


class PagesAt(Struct, frozen=True, array_like=True, tag=True):
    """Pages lie at these places of Memory, and stay there until Taken."""

    places: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of pages."""
        return len(self.places)


class PartsAt(Struct, frozen=True, array_like=True, tag=True):
    """Some parts of pages are saved, and lie at these places of Memory until Taken."""

    places: tuple[int, ...]
    section: Section

    @property
    def count(self) -> int:
        """Number of pages."""
        return len(self.places)


class StateAt(Struct, frozen=True, array_like=True, tag=True):
    """As State, for a state that lies at a place of Memory until Taken."""

    depth: int
    place: int


class Taken(Struct, frozen=True, array_like=True, tag=True):
    """What lay in memory was read."""


class Held(Struct, frozen=True, array_like=True, tag=True):
    """Nothing else was written there before Taken came."""


class Sum(Struct, frozen=True, array_like=True, tag=True):
    """The checksum of the bytes that have come (transfer/checksum.py)."""

    value: int


class Waiting(Struct, frozen=True, array_like=True, tag=True):
    """What comes next is not computed yet."""


class End(Struct, frozen=True, array_like=True, tag=True):
    """No more pages come: all have, or the others will not be there."""


class Refused(Struct, frozen=True, array_like=True, tag=True):
    """No pages come."""

    reason: str


class EncodeAsk(Struct, frozen=True, array_like=True, tag=True):
    """Behind this message come the bytes of a file as an encoder takes it (MediaInput.values), and Sum.
    Encoded answers it, or Refused, behind any number of Waiting."""

    identity: bytes  # of the encoder and its weights
    shape: tuple[int, ...]  # float32
    grid: tuple[int, int, int]
    num_rows: int  # that it is encoded to


class Encoded(Struct, frozen=True, array_like=True, tag=True):
    """Behind this message come the rows, float32 [num_rows, width], and Sum."""

    num_rows: int
    width: int


ToDecode = (
    Found
    | First
    | Pages
    | Parts
    | Dropped
    | State
    | PagesAt
    | PartsAt
    | StateAt
    | Held
    | Waiting
    | End
    | Refused
)
