"""How device memory is divided between the pages of full-attention layers, the pages of sliding-window
layers, and the states of recurrent layers.

Layers with a window need only the tokens that it covers, so with a pool of their own they take less memory
for each token of a long sequence. If all layers of a model have a window, the pages of full-attention layers
take no memory at all: they are virtual, ids by which a sequence counts its tokens. There are enough of them
for the longest sequence, and for more prefixes than the window pages can hold at a time.
"""

from msgspec import Struct, structs

VIRTUAL_PAGES = 4  # for each window page, if full-attention pages take no memory


class Pools(Struct, frozen=True):
    """Numbers of usable pages and state slots, without those for padding. `window` 0: all layers share the
    pages of `full`."""

    full: int
    window: int = 0
    states: int = 0


class MemoryBudget(Struct, frozen=True, kw_only=True):
    """Memory for pages and states, their sizes, and how many can be used."""

    num_bytes: int
    full_page_bytes: int  # of one page in all full layers
    window_page_bytes: int  # of one page in all layers with a window
    most: int  # pages that can be used at all
    longest: int  # pages of the longest sequence
    ratio: float = 0.0  # window pages for each full-attention page; 0: one pool serves all layers
    least: int = 0  # window pages that one sequence needs to run: its window and a step
    state_bytes: int = 0  # of one sequence's states in all recurrent layers; 0: there are none
    state_ratio: float = 0.0  # bytes of states for each byte of keys and values
    num_states: int | None = None  # overrides the ratio
    most_running: int = 0  # sequences that run at once; 0: not known


def has_two_pools(ratio: float, windows: tuple[int, ...], max_len: int) -> bool:
    """Whether sliding-window layers have a pool of their own: they need none if no sequence can be longer
    than the window."""
    return ratio > 0 and 0 < max(windows) < max_len


def least_pages(window: int, page_size: int, step_tokens: int) -> int:
    """Most window pages that one sequence holds: the window before a step's first token and the tokens of the
    step, at any offset within pages."""
    return -(-(window + step_tokens) // page_size) + 1


def divide_memory(room: MemoryBudget) -> Pools:
    """Sizes of the pools that fit in memory; 0 pages if not even one of each kind fits. States are taken from
    the memory before pages are, and no more of them than sequences and pages could keep: two of each sequence
    that runs, and one at the end of each page. Without attention layers all memory is for states."""
    if not room.state_bytes:
        return _divide_pages(room)
    left = room.num_bytes - room.state_bytes  # without the padding slot
    share = room.state_ratio / (1 + room.state_ratio)
    if not room.full_page_bytes and not room.window_page_bytes:
        share = 1.0
    part = int(left * share) // room.state_bytes
    if room.most_running:
        part = min(part, 2 * room.most_running + room.most)
    states = max(room.num_states or part, 1)
    left -= states * room.state_bytes
    pages = _divide_pages(structs.replace(room, num_bytes=left)) if left >= 0 else Pools(0)
    return structs.replace(pages, states=states if pages.full else 0)


def _divide_pages(room: MemoryBudget) -> Pools:
    # an encoder stores no keys and values: all pages are virtual
    if not room.full_page_bytes and not room.window_page_bytes:
        return Pools(room.most)
    left = room.num_bytes - room.full_page_bytes - room.window_page_bytes  # without the padding pages
    if not room.ratio:
        return Pools(max(0, min(room.most, left // (room.full_page_bytes + room.window_page_bytes))))
    if not room.full_page_bytes:
        window = max(0, min(room.most, left // room.window_page_bytes))
        return Pools(min(room.most, max(room.longest, VIRTUAL_PAGES * window)) if window else 0, window)
    full = min(room.most, int(left / (room.full_page_bytes + room.ratio * room.window_page_bytes)))
    window = min(full, max(round(full * room.ratio), room.least))
    # the window pool needs more than its share
    if full * room.full_page_bytes + window * room.window_page_bytes > left:
        full = max(min(full, (left - window * room.window_page_bytes) // room.full_page_bytes), 0)
        window = min(window, full)
    return Pools(max(full, 0), max(window, 0))
