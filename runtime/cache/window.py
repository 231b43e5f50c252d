"""Pages of sliding-window layers, where they have a pool of their own: a sequence holds the pages that its
window covers.

A running sequence holds the window pages of the page-table rows [span.first, span.end): from the first row
that the next token sees to the last that is planned. Each page is owned by the sequence, or by a node of the
prefix tree, which the sequence then locks. Pages that have left the window are released when the first step
is planned that does not see them; earlier steps have read them by the time that step, or a later one,
overwrites them.

A matching prefix can be continued only at a depth where its nodes have all window pages that the next token
sees. These are ends (groups.py): where a sequence continued, where one ended, and where one would have
continued if the pages had been there. The last kind is restored by the sequence, which computes them again.
"""

from collections.abc import Iterable

from msgspec import Struct

from runtime.cache.groups import EvictableNodes
from runtime.cache.node import Node
from runtime.cache.pages import PagePool
from runtime.cache.pool_sizes import least_pages
from runtime.cache.sequence import Sequence


class WindowConfig(Struct, frozen=True, kw_only=True):
    """Size of the pool. `num_pages` includes the padding page; 0: all layers share one pool."""

    num_pages: int = 0
    window: int = 1  # tokens that a token sees, itself included, in the layer with the largest window
    step_tokens: int = 1  # most tokens of one sequence in one step

    def first_row(self, position: int, page_size: int) -> int:
        """The first page-table row that the token at `position` sees."""
        return max(position - self.window + 1, 0) // page_size


class WindowSpan:
    """Window pages that a running sequence holds: for each row from `first` on a node of the tree, or a page
    of its own."""

    __slots__ = ("first", "pages", "reported_end", "lacking")

    def __init__(self, first: int, pages: list[Node | int]) -> None:
        self.first = first
        self.pages = pages
        self.reported_end = first  # rows before this one have been sent to the ranks
        # by row: nodes that match its tokens, near the end of the match, but have no window page
        self.lacking: dict[int, Node] = {}

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.first + len(self.pages)

    @property
    def own(self) -> list[int]:
        """Pages that no node owns."""
        return [entry for entry in self.pages if isinstance(entry, int)]

    def take_unreported(self) -> list[tuple[int, int]]:
        """Rows and pages that have not been sent to the ranks; they count as sent from now on."""
        rows = range(self.reported_end, self.end)
        self.reported_end = self.end
        return [
            (row, entry if isinstance(entry, int) else entry.window)
            for row in rows
            for entry in (self.pages[row - self.first],)
        ]


class WindowPool:
    """The CacheGroup of window pages."""

    kind = "window page"
    field = "window"

    def __init__(self, config: WindowConfig, page_size: int) -> None:
        self.config = config
        self.page_size = page_size
        self.pool = PagePool(config.num_pages)
        # pages before a page's first token that this token sees
        self._tail = -(-(config.window - 1) // page_size)
        self._most = min(least_pages(config.window, page_size, config.step_tokens), self.pool.num_pages)
        self._evictable = EvictableNodes()

    @property
    def num_available(self) -> int:
        """Pages that can be taken now: free or evictable."""
        return self.pool.num_free + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Pages of nodes that no sequence locks."""
        return len(self._evictable)

    def most(self, num_tokens: int) -> int:
        """Most pages that a sequence of `num_tokens` holds at once while it computes them, limited to the
        size of the pool."""
        return min(self._most, -(-num_tokens // self.page_size))

    def usable(self, node: Node) -> Node:
        """See CacheGroup.usable."""
        deepest, run = node, 0
        while node.parent is not None and run < self._tail:
            run += 1
            if not node.window:
                deepest, run = node.parent, 0
            node = node.parent
        return deepest

    # ── sequences ──────────────────────────────────────────────────────────────────────────────────────

    def start(self, sequence: Sequence, match: Node) -> None:
        """See CacheGroup.start. The sequence locks the window pages that its next token sees."""
        assert sequence.node is not None
        first, node = self.config.first_row(sequence.computed_len, self.page_size), sequence.node
        nodes: list[Node | int] = []
        while node.depth > first:
            if not node.window_locks:
                self._evictable.remove(node)
            node.window_locks += 1
            node.is_end = True
            nodes.append(node)
            assert node.parent is not None
            node = node.parent
        nodes.reverse()
        sequence.window = WindowSpan(first, nodes)
        for row in range(match.depth - 1, max(match.depth - self._tail, sequence.node.depth) - 1, -1):
            sequence.window.lacking[row] = match
            assert match.parent is not None
            match = match.parent

    def slide(self, sequence: Sequence) -> None:
        """Releases pages that a step which begins at the sequence's `computed_len` does not see."""
        span = held_by(sequence)
        if (count := self.config.first_row(sequence.computed_len, self.page_size) - span.first) > 0:
            self._release(span, range(span.first, span.first + count))
            del span.pages[:count]
            span.first += count
            span.reported_end = max(span.reported_end, span.first)

    def reach(self, sequence: Sequence) -> int:
        """The position up to which there are pages for the sequence's known tokens. The last known token
        needs a place for the next one as well."""
        known = len(sequence.tokens)
        most = (held_by(sequence).end + self.num_available) * self.page_size
        return most if most != known or known == sequence.max_len else known - 1

    def extend(self, sequence: Sequence) -> None:
        """Takes pages for the tokens up to `computed_len`, which `reach` allows."""
        known, span = len(sequence.tokens), held_by(sequence)
        end = sequence.computed_len + (sequence.computed_len == known < sequence.max_len)
        self._take(span, -(-end // self.page_size) - span.end)

    def grow(self, sequence: Sequence) -> bool:
        """Takes one more page for a sequence that decodes, after those that left the window are released.
        False: there is none."""
        self.slide(sequence)
        if not self.num_available:
            return False
        self._take(held_by(sequence), 1)
        return True

    def publish(self, sequence: Sequence, node: Node) -> None:
        """`node` of the sequence's tokens is in the tree: it takes over the sequence's window page if it has
        none."""
        span = held_by(sequence)
        index = node.depth - 1 - span.first
        if index >= 0 and not node.window:
            page = span.pages[index]
            assert isinstance(page, int)
            node.window = page
            node.window_locks = 1
            span.pages[index] = node

    def leave(self, sequence: Sequence) -> None:
        """See CacheGroup.leave. The deepest pages are evicted first, since those of a shorter prefix remain
        usable."""
        span = held_by(sequence)
        for entry in span.pages:
            if not isinstance(entry, int):
                entry.is_end = True
        self._release(span, reversed(range(span.first, span.end)))
        sequence.window = None

    # ── the tree ───────────────────────────────────────────────────────────────────────────────────────

    def drop(self, node: Node) -> None:
        """See CacheGroup.drop."""
        self._evictable.remove(node)
        self.pool.release([node.window])
        node.window, node.is_end = 0, False

    def _take(self, span: WindowSpan, count: int) -> None:
        for _ in range(count - self.pool.num_free):
            self.drop(self._evictable.next())
        span.pages += self.pool.allocate(max(count, 0))

    def _release(self, span: WindowSpan, rows: Iterable[int]) -> None:
        own: list[int] = []
        for row in rows:
            entry = span.pages[row - span.first]
            if isinstance(entry, int):
                node = span.lacking.get(row)
                if node is None or not node.page or node.window:
                    own.append(entry)
                    continue
                node.window, node.is_end = entry, True
            else:
                node = entry
                node.window_locks -= 1
            if not node.window_locks:
                self._evictable.add(node, is_end=node.is_end)
        self.pool.release(own)


def held_by(sequence: Sequence) -> WindowSpan:
    """Window pages of a running sequence."""
    assert sequence.window is not None, "the sequence is not running"
    return sequence.window


def open_windows(config: WindowConfig, page_size: int) -> WindowPool | None:
    """An empty pool; None if all layers share one pool."""
    return WindowPool(config, page_size) if config.num_pages else None
