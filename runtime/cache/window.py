"""The pages of sliding-window layers, where they have a pool of their own: a sequence holds what its window
can still see.

A running sequence holds the window's pages of the page-table rows [span.first, span.end): from the first that
the next token sees to the last that is planned. Each is the sequence's own, or a node's of the prefix tree,
which the sequence then locks. What slides out goes back when the first step is planned that cannot see it:
steps submitted before have read it by the time a later one, or this one, writes it.

A prefix found in the tree can be continued only at a depth where the nodes have all pages that the next token
sees. Those are ends (sides.py says what that means) where a sequence went on, where one ended, and where one
would have gone on had they been there: it brings them back when it has computed them again.
"""

from collections.abc import Iterable

from msgspec import Struct

from runtime.cache.groups import Idle
from runtime.cache.node import Node
from runtime.cache.pages import PagePool
from runtime.cache.pool_sizes import least_pages
from runtime.scheduling.sequence import Sequence


class WindowConfig(Struct, frozen=True, kw_only=True):
    """`num_pages` of the pool, padding page included; 0: all layers share one pool."""

    num_pages: int = 0
    window: int = 1  # tokens that a token sees, itself included; of the layer that sees most
    step_tokens: int = 1  # most tokens of one sequence in one step

    def first_row(self, position: int, page_size: int) -> int:
        """Of the page table, that the token at `position` sees."""
        return max(position - self.window + 1, 0) // page_size


class Span:
    """What a running sequence holds: by row from `first` on, a node of the tree or a page of its own."""

    __slots__ = ("first", "pages", "told", "lacking")

    def __init__(self, first: int, pages: list[Node | int]) -> None:
        self.first = first
        self.pages = pages
        self.told = first  # the ranks know the rows before this one
        # by row: nodes without page at the end of what was found of its tokens
        self.lacking: dict[int, Node] = {}

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    @property
    def own(self) -> list[int]:
        return [entry for entry in self.pages if isinstance(entry, int)]

    def tell(self) -> list[tuple[int, int]]:
        """Rows and pages that the ranks do not know yet, and do from now on."""
        rows = range(self.told, self.end)
        self.told = self.end
        return [
            (row, entry if isinstance(entry, int) else entry.window)
            for row in rows
            for entry in (self.pages[row - self.first],)
        ]


class WindowPool:
    """Every page is free, a node's, or one sequence's own."""

    kind = "window page"
    field = "window"

    def __init__(self, config: WindowConfig, page_size: int) -> None:
        self.config = config
        self.page_size = page_size
        self.pool = PagePool(config.num_pages)
        # pages before a page's first token that this token sees
        self._tail = -(-(config.window - 1) // page_size)
        self._most = min(least_pages(config.window, page_size, config.step_tokens), self.pool.num_pages)
        self._idle = Idle()

    @property
    def num_available(self) -> int:
        """Pages that can be had now, free or evictable."""
        return self.pool.num_free + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages that the tree has and nobody locks."""
        return len(self._idle)

    def most(self, num_tokens: int) -> int:
        """Pages that a sequence of so many tokens holds at once while it computes them; more than there are
        it never needs."""
        return min(self._most, -(-num_tokens // self.page_size))

    def usable(self, node: Node) -> Node:
        found, run = node, 0
        while node.parent is not None and run < self._tail:
            run += 1
            if not node.window:
                found, run = node.parent, 0
            node = node.parent
        return found

    # ── sequences ──────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, sequence: Sequence, match: Node) -> None:
        """`sequence` was admitted at a usable node, at or above its `match`: it locks what its next token
        sees."""
        first, node, nodes = (
            self.config.first_row(sequence.computed_len, self.page_size),
            sequence.node,
            list[Node | int](),
        )
        while node.depth > first:
            if not node.window_locks:
                self._idle.remove(node)
            node.window_locks += 1
            node.is_end = True
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        sequence.window = Span(first, nodes)
        for row in range(match.depth - 1, max(match.depth - self._tail, sequence.node.depth) - 1, -1):
            sequence.window.lacking[row] = match
            assert match.parent is not None
            match = match.parent

    def slide(self, sequence: Sequence) -> None:
        """A step that begins at the sequence's `computed_len` is planned: what it cannot see goes back."""
        span = sequence.window
        if (count := self.config.first_row(sequence.computed_len, self.page_size) - span.first) > 0:
            self._give_back(span, range(span.first, span.first + count))
            del span.pages[:count]
            span.first += count
            span.told = max(span.told, span.first)

    def reach(self, sequence: Sequence) -> int:
        """The position up to which the sequence could compute its known tokens now. With the last of them
        comes a place for the next."""
        known = len(sequence.tokens)
        most = (sequence.window.end + self.num_available) * self.page_size
        return most if most != known or known == sequence.max_len else known - 1

    def extend(self, sequence: Sequence) -> None:
        """Takes pages for the tokens up to `computed_len`, which `reach` allows."""
        known = len(sequence.tokens)
        end = sequence.computed_len + (sequence.computed_len == known < sequence.max_len)
        self._take(sequence.window, -(-end // self.page_size) - sequence.window.end)

    def grow(self, sequence: Sequence) -> bool:
        """One more page for a sequence that decodes; what slid out goes back first. False: none to be had."""
        self.slide(sequence)
        if not self.num_available:
            return False
        self._take(sequence.window, 1)
        return True

    def publish(self, sequence: Sequence, node: Node) -> None:
        """The tree has `node` of the sequence's tokens: it gets the sequence's page, if it has none."""
        span = sequence.window
        index = node.depth - 1 - span.first
        if index >= 0 and not node.window:
            node.window = span.pages[index]
            node.window_locks = 1
            span.pages[index] = node

    def leave(self, sequence: Sequence) -> None:
        """The sequence stops running. The deepest pages will go first: what is left of a short prefix is of
        use from its beginning on."""
        span = sequence.window
        for entry in span.pages:
            if not isinstance(entry, int):
                entry.is_end = True
        self._give_back(span, reversed(range(span.first, span.end)))
        sequence.window = None

    # ── the tree ───────────────────────────────────────────────────────────────────────────────────────────────

    def drop(self, node: Node) -> None:
        self._idle.remove(node)
        self.pool.release([node.window])
        node.window, node.is_end = 0, False

    def _take(self, span: Span, count: int) -> None:
        for _ in range(count - self.pool.num_free):
            self.drop(self._idle.next())
        span.pages += self.pool.allocate(max(count, 0))

    def _give_back(self, span: Span, rows: Iterable[int]) -> None:
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
                self._idle.add(node, is_end=node.is_end)
        self.pool.release(own)


def open_windows(config: WindowConfig, page_size: int) -> WindowPool | None:
    """An empty pool, where there is one."""
    return WindowPool(config, page_size) if config.num_pages else None
