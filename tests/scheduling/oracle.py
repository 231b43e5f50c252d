"""A rank that computes nothing but remembers everything: the judge of plans.

Its "keys and values" are the tokens themselves, written to pages as a real rank would. The next token is a
hash of what the row finds through its page table, so a wrong page, a stale page or a missing token changes
the output.
"""

from hashlib import blake2b

import numpy as np

from runtime.messages.steps import PageCopies, PromptLogprobs, StepPlan, StepResult

VOCAB = 50


def next_token(tokens: list[int]) -> int:
    return blake2b(bytes(tokens), digest_size=4).digest()[0] % VOCAB


def generate(prompt: list[int], stop_ids: set[int], max_len: int) -> list[int]:
    """What must come out, whatever the schedule."""
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class OracleRank:
    """Executes plans in order; raises AssertionError on a plan that no rank could run."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_slots: int,
        step: int = 0,
        num_host_pages: int = 0,
        num_window_pages: int = 0,
        window: int = 0,
        num_state_slots: int = 0,
        longest_run: int = 1,
    ) -> None:
        self.page_size = page_size
        self.pages = np.full((num_pages, page_size), -1)
        self.host = np.full((num_host_pages, page_size), -1)
        self.unknown: dict[int, PageCopies] = {}  # by step: what nobody has heard of yet
        self.window = window  # of the layers with a pool of their own; 0: there are none
        self.window_pages = np.zeros((num_window_pages, page_size), dtype=object)
        self.window_table = np.zeros((max_slots, num_pages + 1), dtype=int)
        # all tokens so far: what a recurrent layer folds into one state
        self.states: list[bytes | None] = [None] * num_state_slots
        self.state_slot = np.zeros(max_slots, dtype=int)
        self.table = np.zeros((max_slots, num_pages + 1), dtype=int)
        self.last_token = np.full(max_slots, -1)
        self.longest_run = longest_run  # tokens that a row may bring at once, as if a grammar forced them
        self.told_len = [0] * max_slots
        self.prompt_logprobs = np.full(max_slots, -1)
        self.step = step

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.step + 1
        self.step = plan.step
        if plan.page_copies is not None:
            self._move(plan.page_copies)
            self.unknown[plan.step] = plan.page_copies
        assert plan.page_copies is not None or len(plan.slots), "a plan of nothing"
        for admit in plan.admits:
            self.table[admit.slot] = self.window_table[admit.slot] = 0
            self.last_token[admit.slot] = -1
            self.told_len[admit.slot] = 0
            self.state_slot[admit.slot] = 0
            self.prompt_logprobs[admit.slot] = admit.sampling.prompt_logprobs
        self.table[plan.page_slots, plan.page_rows] = plan.page_ids
        assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot stands in two rows"
        if plan.window is not None:
            assert self.window and min(plan.window.ids) > 0
            self.window_table[plan.window.slots, plan.window.rows] = plan.window.ids
        self._store(plan)
        if self.window:
            self._see(plan)
        if self.states:
            self._recur(plan)
        assert self.states or plan.states is None
        runs = [self._sample(row, plan) for row in range(len(plan.slots)) if plan.samples[row]]
        counts = [len(run) for run in runs]
        return StepResult(
            plan.step,
            np.array(sum(runs, []), dtype=np.int32),
            -1,
            np.zeros(0),
            np.zeros(0),
            np.zeros(0),
            self._prompt_parts(plan),
            0.0,
            num_tokens=np.array(counts, np.int32) if max(counts, default=1) > 1 else None,
        )

    def touched(self, last_step: int, *, loads: bool) -> set[int]:
        """Host pages that steps after `last_step` save to, or load from."""
        flying = [page_copies for step, page_copies in self.unknown.items() if step > last_step]
        return {
            host
            for page_copies in flying
            for host in (
                *page_copies.save_hosts.tolist(),
                *(page_copies.load_hosts.tolist() if loads else ()),
            )
        }

    def die(self, last_step: int) -> None:
        """What was to be saved by steps after `last_step` may be there, or half of it."""
        for step, page_copies in self.unknown.items():
            if step > last_step:
                self.host[page_copies.save_hosts, ::2] = -1
        self.unknown.clear()

    def _move(self, page_copies: PageCopies) -> None:
        for pages in (page_copies.save_hosts, page_copies.save_pages, page_copies.load_pages):
            assert len(set(pages.tolist())) == len(pages) and 0 not in pages
        assert self.pages[page_copies.save_pages].min(initial=0) >= 0, "a page is saved that nobody wrote"
        self.host[page_copies.save_hosts] = self.pages[page_copies.save_pages]
        assert self.host[page_copies.load_hosts].min(initial=0) >= 0, "a page is loaded that nobody saved"
        self.pages[page_copies.load_pages] = self.host[page_copies.load_hosts]

    def _store(self, plan: StepPlan) -> None:
        written: set[tuple[int, int]] = set()
        known = iter(plan.token_ids.tolist())
        for row, (slot, start, count) in enumerate(zip(plan.slots, plan.starts, plan.counts, strict=True)):
            if row < plan.num_decodes:
                assert count == 1 and plan.samples[row] and self.last_token[slot] >= 0
                tokens = [self.last_token[slot]]
            else:
                tokens = [next(known) for _ in range(count)]
            for position, token in enumerate(tokens, start=start):
                place = (self.table[slot, position // self.page_size], position % self.page_size)
                assert place[0] > 0, "the padding page is written"
                assert place not in written, "two rows write one place"
                written.add(place)
                self.pages[place] = token
        assert next(known, None) is None, "tokens left over"

    def _see(self, plan: StepPlan) -> None:
        """Layers with a window keep for each token a mark of all tokens up to it. Each computed token must
        find the right ones."""
        rows = [
            (slot, start, [bytes(self._context(slot, end + 1)) for end in range(start + count)])
            for slot, start, count in zip(
                plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True
            )
        ]
        written: set[tuple[int, int]] = set()
        for slot, start, marks in rows:
            for position in range(start, len(marks)):
                place = (self.window_table[slot, position // self.page_size], position % self.page_size)
                assert place[0] > 0 and place not in written
                written.add(place)
                self.window_pages[place] = marks[position]
        for slot, start, marks in rows:
            for position in range(max(0, start - self.window + 1), len(marks)):
                page = self.window_table[slot, position // self.page_size]
                assert self.window_pages[page, position % self.page_size] == marks[position], (
                    "a window sees what is not its own"
                )

    def _recur(self, plan: StepPlan) -> None:
        """Each row must start from the state of all tokens before it."""
        page_copies = plan.states
        if page_copies is not None:
            self.state_slot[page_copies.slots] = page_copies.owned
            assert self.states[0] is None and 0 not in page_copies.load_to and 0 not in page_copies.keep_to
            for written in (page_copies.load_to.tolist(), page_copies.keep_to.tolist()):
                assert len(set(written)) == len(written)
            assert set(page_copies.load_to.tolist()) <= set(page_copies.owned.tolist())
            self._copy_states(
                [b"" if source == 0 else self.states[source] for source in page_copies.load_from],
                page_copies.load_to,
            )
        owned = self.state_slot[plan.slots].tolist()
        assert 0 not in owned and len(set(owned)) == len(owned)
        for slot, start, count, state in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), owned, strict=True
        ):
            tokens = bytes(self._context(slot, start + count))
            assert self.states[state] == tokens[:start], "a row starts from another state than its own"
            self.states[state] = tokens
        if page_copies is not None:
            assert not set(page_copies.keep_to.tolist()) & set(owned) and set(
                page_copies.keep_from.tolist()
            ) <= set(owned)
            self._copy_states([self.states[source] for source in page_copies.keep_from], page_copies.keep_to)

    def _copy_states(self, contents: list[bytes | None], places: np.ndarray) -> None:
        for content, place in zip(contents, places.tolist(), strict=True):
            assert content is not None, "a state is copied that nobody made"
            self.states[place] = content

    def _context(self, slot: int, length: int) -> list[int]:
        rows = self.table[slot, : -(-length // self.page_size)]
        return self.pages[rows].reshape(-1)[:length].tolist()

    def _sample(self, row: int, plan: StepPlan) -> list[int]:
        slot = plan.slots[row]
        context = self._context(slot, plan.starts[row] + plan.counts[row])
        assert min(context) >= 0, "a row reads what nobody wrote"
        run = [next_token(context)]
        self.last_token[slot] = run[0]
        # else a row brought this token before
        if len(context) >= self.told_len[slot] and self.prompt_logprobs[slot] < 0:
            while len(run) < self.longest_run and next_token([*context, *run, 99]) % 4:
                run.append(next_token([*context, *run]))
            self.told_len[slot] = len(context) + len(run)
        return run

    def _prompt_parts(self, plan: StepPlan) -> list[PromptLogprobs]:
        parts, at = [], 0
        for row in range(plan.num_decodes, len(plan.slots)):
            if self.prompt_logprobs[plan.slots[row]] >= 0:
                targets = plan.prompt_targets[at : at + plan.counts[row]]
                at += plan.counts[row]
                parts.append(
                    PromptLogprobs(
                        int(plan.slots[row]), 0, -targets.astype(np.float32), np.zeros(0), np.zeros(0)
                    )
                )
        assert at == len(plan.prompt_targets)
        return parts
