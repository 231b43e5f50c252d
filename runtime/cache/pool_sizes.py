"""How the memory for keys and values is shared between the pool of full layers, that of sliding-window layers
and states of recurrent ones.

Layers with a window need only what it can still see, so with a pool of their own they take less for each
token of a long sequence. A model all of whose layers have one needs no memory at all for the pages of full
layers: these are then mere numbers by which a sequence counts its tokens, and there are enough of them for
the longest sequence and for prefixes beyond what the window's pages can hold at a time.
"""

from msgspec import Struct, structs

NUMBERS = 4  # pages that are mere numbers, for each page of the windows' pool


class Pools(Struct, frozen=True):
    """Usable pages and state slots; what pads comes on top. `window` 0: all layers share the pages of
    `full`."""

    full: int
    window: int = 0
    states: int = 0


class Room(Struct, frozen=True, kw_only=True):
    """What pages may take: bytes, and how many there is use for."""

    num_bytes: int
    full_page_bytes: int  # of one page in all full layers
    window_page_bytes: int  # of one page in all layers with a window
    most: int  # pages
    longest: int  # pages of one sequence
    ratio: float = 0.0  # pages of the window's pool for each of the full one; 0: one pool
    least: int = 0  # window pages without which a sequence cannot run: its window and a step
    state_bytes: int = 0  # of one sequence's states in all recurrent layers; 0: there are none
    state_ratio: float = 0.0  # bytes of states for each of keys and values
    num_states: int | None = None  # None: as many as the ratio gives


def has_two_pools(ratio: float, windows: tuple[int, ...], max_len: int) -> bool:
    """Windows that no sequence outgrows see everything."""
    return ratio > 0 and 0 < max(windows) < max_len


def least_pages(window: int, page_size: int, step_tokens: int) -> int:
    """What one sequence holds at most: the window before a step's first token, and the tokens of the step, at
    any offset in their pages."""
    return -(-(window + step_tokens) // page_size) + 1


def share(room: Room) -> Pools:
    """Pools that fit, without pages where not even one of each does. States are taken from what there is
    before pages are counted."""
    if not room.state_bytes:
        return _share_pages(room)
    left = room.num_bytes - room.state_bytes  # without the padding slot
    part = int(left * room.state_ratio / (1 + room.state_ratio)) // room.state_bytes
    states = max(room.num_states or part, 1)
    pages = _share_pages(structs.replace(room, num_bytes=left - states * room.state_bytes))
    return structs.replace(pages, states=states if pages.full else 0)


def _share_pages(room: Room) -> Pools:
    # an encoder keeps no keys and values: pages are mere numbers
    if not room.full_page_bytes and not room.window_page_bytes:
        return Pools(room.most)
    left = room.num_bytes - room.full_page_bytes - room.window_page_bytes  # without the padding pages
    if not room.ratio:
        return Pools(max(0, min(room.most, left // (room.full_page_bytes + room.window_page_bytes))))
    if not room.full_page_bytes:
        window = max(0, min(room.most, left // room.window_page_bytes))
        return Pools(min(room.most, max(room.longest, NUMBERS * window)) if window else 0, window)
    full = min(room.most, int(left / (room.full_page_bytes + room.ratio * room.window_page_bytes)))
    window = min(full, max(round(full * room.ratio), room.least))
    # what a window needs at least is beyond its part
    if full * room.full_page_bytes + window * room.window_page_bytes > left:
        full = max(min(full, (left - window * room.window_page_bytes) // room.full_page_bytes), 0)
        window = min(window, full)
    return Pools(max(full, 0), max(window, 0))
