"""Budgets of reasoning: how many tokens a sequence may reason before the marker that ends its reasoning is
forced. Behind it, the marker that begins reasoning is excluded where it would begin reasoning again."""

from runtime.messages.requests import Thinking

MARGIN = 2  # tokens of white space that may stand before an opening marker


class ThinkingBudget:
    """The reasoning of one sequence so far."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._open = thinking.open  # place of the markers of the reasoning that is open; -1: none is
        self._left = thinking.budget
        self._count = 0  # of new tokens since the last reasoning
        self._tail: tuple[int, ...] = ()  # the latest tokens
        self._longest = max(map(len, (*thinking.begins, *thinking.ends)))

    def tell(self, token: int) -> None:
        """The sequence goes on with `token`."""
        self._tail = (*self._tail, token)[-self._longest :]
        if self._open >= 0:
            if self._tail_is(self._thinking.ends[self._open]):
                self._close(0)
            else:
                self._left -= 1
            return
        self._count += 1
        for place, begin in enumerate(self._thinking.begins):
            if self._is_due(self._count - len(begin)) and self._tail_is(begin):
                self._open, self._tail = place, ()

    def cut(self) -> list[int]:
        """The tokens that end the reasoning, where its budget is used up; else none. What the model has
        written of them already is not repeated."""
        if self._open < 0 or self._left > 0:
            return []
        end = self._thinking.ends[self._open]
        written = next((n for n in range(len(end) - 1, 0, -1) if self._tail_is(end[:n])), 0)
        rest = list(end[written:])
        self._close(-len(rest))
        return rest

    def excluded(self) -> list[int]:
        """Tokens that would begin reasoning again when the budget is used up: the first that tells a marker
        from others, which may begin with the same token."""
        if self._open >= 0 or self._left > 0:
            return []
        return [
            begin[at]
            for begin in self._thinking.begins
            if self._is_due(self._count - (at := min(1, len(begin) - 1))) and self._tail_is(begin[:at])
        ]

    def _close(self, count: int) -> None:
        self._open, self._tail, self._count = -1, (), count

    def _is_due(self, num_before: int) -> bool:
        """Whether a marker behind `num_before` tokens of text begins reasoning."""
        return self._thinking.is_anywhere or num_before <= MARGIN

    def _tail_is(self, mark: tuple[int, ...]) -> bool:
        return not mark or self._tail[-len(mark) :] == mark
