"""How many tokens of a prompt a step takes: chunks that take the same time (`--enable-dynamic-chunking`), and
steps that take no longer than a bound while sequences decode (`--max-step-ms`).

A token attends to all before it, so equal chunks of a long prompt take longer and longer, and streams that
share their steps slow down.
"""

from runtime.scheduling.step_costs import StepCosts, Work

SMALLEST = 8  # a chunk of equal time is never less than this part of a full one


class Chunking:
    """Cuts prompts by what steps cost."""

    def __init__(self, page_size: int, *, bound_s: float = 0.0, is_equal: bool = True) -> None:
        """`bound_s`: of a step in which sequences decode; 0: none. `is_equal`: chunks take the same time."""
        self.page_size = page_size
        self.bound_s = bound_s
        self.is_equal = is_equal
        self.costs = StepCosts()
        self._left_s: float | None = None  # for prompts of the step that is planned; None: no bound
        self._left_tokens = 0

    def learn(self, work: Work, compute_s: float) -> None:
        """A step of this work took `compute_s` seconds."""
        self.costs.learn(work, compute_s)

    def begin(self, work: Work) -> None:
        """A step that computes this much for decoding sequences gets prompts now."""
        is_bound = self.bound_s > 0 and (work.decodes or work.tokens)
        self._left_s = self.costs.room_s(self.bound_s, work) if is_bound else None
        self._left_tokens = self.costs.most_tokens

    def size(self, start: int, full: int) -> int:
        """Tokens of a chunk from position `start`, at most `full`, that takes as long as `full` tokens from
        the beginning of a prompt."""
        if not self.is_equal or start == 0:
            return full
        size = self.costs.equal_tokens(start, full)
        return full if size >= full else max(self._whole_pages(size), full // SMALLEST, 1)

    def room(self, start: int, most: int) -> int:
        """Tokens from position `start` that the step has time for, at most `most`: a page's at least, so that
        no prompt stands still."""
        if self._left_s is None:
            return most
        size = self.costs.tokens_within(self._left_s, start, min(most, self._left_tokens))
        return size if size >= most else min(most, max(self._whole_pages(size), self.page_size))

    def take(self, start: int, count: int) -> None:
        """The step computes `count` tokens from position `start`."""
        if self._left_s is not None:
            self._left_s -= self.costs.prompt_s(start, count)
            self._left_tokens -= count

    def spend(self, seconds: float) -> None:
        """The step does something else for prompts that takes so long."""
        if self._left_s is not None:
            self._left_s -= seconds

    @property
    def left_s(self) -> float | None:
        """Seconds that the step that is planned has for prompts; None: any."""
        return self._left_s

    @property
    def is_full(self) -> bool:
        """Whether the step that is planned has no time for another page of a prompt."""
        if self._left_s is None:
            return False
        return self._left_tokens < self.page_size or self.costs.prompt_s(0, self.page_size) > self._left_s

    def _whole_pages(self, size: int) -> int:
        return size // self.page_size * self.page_size
