"""A rank that computes nothing but remembers everything: the judge of plans.

Its "keys and values" are the tokens themselves, written to pages as a real rank would. The next token is a
hash of what the row finds through its page table, so a wrong page, a stale page or a missing token changes
the output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from runtime.messages.steps import (
    OWN_DRAFT,
    Admit,
    BlockSampling,
    PageCopies,
    PromptLogprobs,
    Samples,
    StateCopies,
    StepPlan,
    StepResult,
)
from tests.scheduling.answers import VOCAB, find, next_token


@dataclass(frozen=True)
class Row:
    """Tokens that a row computes, from position `start` on; `parents`: which of them each one follows."""

    slot: int
    start: int
    tokens: list[int]
    parents: list[int]
    samples: Samples
    is_drafted: bool


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
        num_host_states: int = 0,
        longest_run: int = 1,
        own_luck: float = 0.5,
    ) -> None:
        self.page_size = page_size
        self.pages = np.full((num_pages, page_size), -1)
        self.host = np.full((num_host_pages, page_size), -1)
        self.unknown: dict[int, PageCopies] = {}  # by step, as long as no result reports it
        self.window = window  # of the layers with a pool of their own; 0: there are none
        self.window_pages = np.zeros((num_window_pages, page_size), dtype=object)
        self.window_table = np.zeros((max_slots, num_pages + 1), dtype=int)
        # all tokens so far: what a recurrent layer folds into one state
        self.states: list[bytes | None] = [None] * num_state_slots
        self.host_states: list[bytes | None] = [None] * num_host_states
        self.unknown_states: dict[int, list[int]] = {}  # by step: places that it saves to
        self.unknown_fetches: dict[int, list[int]] = {}  # and places that it fetches from
        self.state_slot = np.zeros(max_slots, dtype=int)
        self.table = np.zeros((max_slots, num_pages + 1), dtype=int)
        self.last_token = np.full(max_slots, -1)
        self.lengths = [0] * max_slots
        self.longest_run = longest_run  # a sampled token and those that follow it as if a grammar forced them
        self.own_luck = own_luck  # with which it guesses itself
        self.random = Random(0)
        self.reported_len = [0] * max_slots
        self.prompt_logprobs = np.full(max_slots, -1)
        self.step = step
        self.seconds: Callable[[StepPlan], float] = lambda plan: 0.0  # that a step takes

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.step + 1
        self.step = plan.step
        if plan.page_copies is not None:
            self._move(plan.page_copies)
            self.unknown[plan.step] = plan.page_copies
        assert plan.page_copies is not None or plan.states is not None or len(plan.slots), "a plan of nothing"
        for admit in plan.admits:
            self._admit(admit)
        self.table[plan.page_slots, plan.page_rows] = plan.page_ids
        assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot stands in two rows"
        if plan.window is not None:
            assert self.window and min(plan.window.ids) > 0
            self.window_table[plan.window.slots, plan.window.rows] = plan.window.ids
        rows = self._rows(plan)
        self._store(rows)
        if plan.page_copies is not None:
            computed, hosts = plan.page_copies.computed_pages, plan.page_copies.computed_hosts
            assert self.pages[computed].min(initial=0) >= 0, "a page is saved before it is full"
            self.host[hosts] = self.pages[computed]
        if self.window:
            self._see(rows)
        if self.states:
            self._recur(plan, rows)
        assert self.states or plan.states is None
        sampled, confidences = list[list[int]](), list[float]()
        forced: dict[int, list[int]] = {}
        for row in rows:
            if row.samples is Samples.NONE:
                self.lengths[row.slot] += len(row.tokens)
                continue
            if plan.blocks is not None:
                sampled.append(self._fill(row, plan.blocks, confidences))
                continue
            sampled.append(self._sample(row))
            if run := self._force(row, sampled[-1][-1]):
                forced[len(sampled) - 1] = run
        if self.states:
            self._accept_states(plan, rows)
        counts = [len(tokens) for tokens in sampled]
        return StepResult(
            plan.step,
            np.array(sum(sampled, []), dtype=np.int32),
            -1,
            np.zeros(0),
            np.zeros(0),
            np.zeros(0),
            self._prompt_parts(plan),
            self.seconds(plan),
            num_tokens=np.array(counts, np.int32) if max(counts, default=1) > 1 else None,
            forced=forced,
            confidences=np.array(confidences, np.float32) if plan.blocks is not None else None,
        )

    def _admit(self, admit: Admit) -> None:
        self.table[admit.slot] = self.window_table[admit.slot] = self.state_slot[admit.slot] = 0
        self.last_token[admit.slot], self.lengths[admit.slot] = -1, admit.length
        self.reported_len[admit.slot] = 0
        self.prompt_logprobs[admit.slot] = admit.sampling.prompt_logprobs

    def _fill(self, row: Row, blocks: BlockSampling, confidences: list[float]) -> list[int]:
        """What is found at the places of the row's last block, by all that is seen there. It is not kept."""
        end = row.start + len(row.tokens)
        assert row.samples is Samples.BLOCK and row.start % blocks.size == end % blocks.size == 0
        assert blocks.mask_id not in row.tokens[: -blocks.size], "a mask in a block that is complete"
        self.lengths[row.slot] = end - blocks.size
        found, likely = find(self._stored(row.slot, end), blocks.size)
        confidences += likely
        return found

    def touched(self, last_step: int, *, loads: bool) -> set[int]:
        """Host pages that steps after `last_step` save to, or load from."""
        flying = [page_copies for step, page_copies in self.unknown.items() if step > last_step]
        return {
            host
            for page_copies in flying
            for hosts in (page_copies.save_hosts, page_copies.computed_hosts, page_copies.load_hosts)
            if loads or hosts is not page_copies.load_hosts
            for host in hosts.tolist()
        }

    def touched_states(self, last_step: int, *, fetches: bool) -> set[int]:
        """Places of states that steps after `last_step` save to, or fetch from."""
        flying = [*self.unknown_states.items(), *(self.unknown_fetches.items() if fetches else ())]
        return {place for step, places in flying if step > last_step for place in places}

    def die(self, last_step: int) -> None:
        """What was to be saved by steps after `last_step` may be there, or half of it."""
        for step, page_copies in self.unknown.items():
            if step > last_step:
                self.host[page_copies.save_hosts, ::2] = -1
                self.host[page_copies.computed_hosts, ::2] = -1
        for step, places in self.unknown_states.items():
            if step > last_step:
                for place in places:
                    self.host_states[place] = None
        self.unknown.clear()
        self.unknown_states.clear()
        self.unknown_fetches.clear()

    def _move(self, page_copies: PageCopies) -> None:
        for pages in (page_copies.save_hosts, page_copies.save_pages, page_copies.load_pages):
            assert len(set(pages.tolist())) == len(pages) and 0 not in pages
        assert self.pages[page_copies.save_pages].min(initial=0) >= 0, "a page is saved that no one wrote"
        self.host[page_copies.save_hosts] = self.pages[page_copies.save_pages]
        assert self.host[page_copies.load_hosts].min(initial=0) >= 0, "a page is loaded that no one saved"
        self.pages[page_copies.load_pages] = self.host[page_copies.load_hosts]

    def _rows(self, plan: StepPlan) -> list[Row]:
        """The plan's rows, with the tokens that they compute and where these stand."""
        assert plan.num_decodes + plan.num_verifies <= len(plan.slots)
        rows, known, at = [], plan.token_ids.tolist(), 0
        parents = None if plan.draft_parents is None else plan.draft_parents.tolist()
        for row, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.counts.tolist(), strict=True)):
            is_drafted = plan.num_decodes <= row < plan.num_decodes + plan.num_verifies
            tokens, row_parents = [], list(range(-1, count - 1))
            if row < plan.num_decodes + plan.num_verifies:
                assert plan.samples[row] and self.last_token[slot] >= 0
                assert (count > 1) == is_drafted
                tokens = [self.last_token[slot]]
            if is_drafted and parents is not None:
                row_parents = [-1, *parents[at : at + count - 1]]
                assert all(0 <= parent <= i for i, parent in enumerate(row_parents[1:]))
            more = count - len(tokens)
            tokens += known[at : at + more]
            at += more
            if OWN_DRAFT in tokens:
                assert is_drafted and plan.follows and Samples(plan.samples[row]) is Samples.ALL
                assert tokens[1:] == [OWN_DRAFT] * (count - 1)
                tokens, row_parents = self._guess(slot, count - 1)
            rows.append(
                Row(slot, self.lengths[slot], tokens, row_parents, Samples(plan.samples[row]), is_drafted)
            )
        assert at == len(known), "tokens left over"
        return rows

    def _guess(self, slot: int, count: int) -> tuple[list[int], list[int]]:
        """A tree of `count` drafts of its own after the slot's last token; a chain where states are kept."""
        before = [*self._stored(slot, self.lengths[slot]), int(self.last_token[slot])]
        paths, parents = [before], [-1]
        for _ in range(count):
            first = len(paths) - 1 if self.states else max(0, len(paths) - 2)
            parent = self.random.randrange(first, len(paths))
            is_right = self.random.random() < self.own_luck
            token = next_token(paths[parent]) if is_right else self.random.randrange(VOCAB)
            paths.append([*paths[parent], token])
            parents.append(parent)
        return [path[-1] for path in paths], parents

    def _store(self, rows: list[Row]) -> None:
        written: set[tuple[int, int]] = set()
        for row in rows:
            for position, token in enumerate(row.tokens, start=row.start):
                place = (self.table[row.slot, position // self.page_size], position % self.page_size)
                assert place[0] > 0, "the padding page is written"
                assert place not in written, "two rows write one place"
                written.add(place)
                self.pages[place] = token

    def _see(self, rows: list[Row]) -> None:
        """Layers with a window keep for each token a mark of all tokens up to it. Each computed token must
        find the right ones."""
        written: set[tuple[int, int]] = set()
        for row in rows:
            for node in range(len(row.tokens)):
                position = row.start + node
                place = (self.window_table[row.slot, position // self.page_size], position % self.page_size)
                assert place[0] > 0 and place not in written
                written.add(place)
                self.window_pages[place] = bytes(self._context(row, node))
        for row in rows:
            before = self._stored(row.slot, row.start)
            for position in range(max(0, row.start - self.window + 1), row.start):
                page = self.window_table[row.slot, position // self.page_size]
                assert self.window_pages[page, position % self.page_size] == bytes(before[: position + 1]), (
                    "a window sees what is not its own"
                )

    def _recur(self, plan: StepPlan, rows: list[Row]) -> None:
        """Each row must start from the state of all tokens before it."""
        page_copies = plan.states
        if page_copies is not None:
            self.state_slot[page_copies.slots] = page_copies.owned
            assert self.states[0] is None and 0 not in page_copies.load_to and 0 not in page_copies.keep_to
            for written in (page_copies.load_to.tolist(), page_copies.keep_to.tolist()):
                assert len(set(written)) == len(written)
            self._move_states(plan.step, page_copies)
            assert set(page_copies.load_to.tolist()) <= set(page_copies.owned.tolist())
            self._copy_states(
                [b"" if source == 0 else self.states[source] for source in page_copies.load_from],
                page_copies.load_to,
            )
        owned = self.state_slot[plan.slots].tolist()
        assert 0 not in owned and len(set(owned)) == len(owned)
        for row, state in zip(rows, owned, strict=True):
            tokens = bytes(self._stored(row.slot, row.start + len(row.tokens)))
            assert self.states[state] == tokens[: row.start], "a row starts from another state than its own"
            if row.samples is Samples.ALL:
                assert row.parents == list(range(-1, len(row.tokens) - 1)), "a tree of drafts"
            else:  # else it is known behind the sampling
                self.states[state] = tokens
        if page_copies is not None:
            assert not set(page_copies.keep_to.tolist()) & set(owned) and set(
                page_copies.keep_from.tolist()
            ) <= set(owned)
            is_known = page_copies.keep_at < 0
            open_rows = {s for s, row in zip(owned, rows, strict=True) if row.samples is Samples.ALL}
            assert not open_rows & set(page_copies.keep_from[is_known].tolist())
            assert set(page_copies.keep_from[~is_known].tolist()) <= open_rows
            self._copy_states(
                [self.states[source] for source in page_copies.keep_from[is_known]],
                page_copies.keep_to[is_known],
            )

    def _accept_states(self, plan: StepPlan, rows: list[Row]) -> None:
        """Rows of drafts leave the state of what they have accepted, and keep the one that they pass."""
        for row in rows:
            if row.samples is not Samples.ALL:
                continue
            state = self.state_slot[row.slot]
            self.states[state] = bytes(self._stored(row.slot, self.lengths[row.slot]))
            if plan.states is None:
                continue
            for source, to, at in zip(
                plan.states.keep_from, plan.states.keep_to, plan.states.keep_at, strict=True
            ):
                if source == state and row.start < at <= self.lengths[row.slot]:
                    self.states[to] = bytes(self._stored(row.slot, int(at)))

    def _move_states(self, step: int, copies: StateCopies) -> None:
        """Saves to host memory, then what comes back from there."""
        saved, places = copies.save_from.tolist(), copies.save_to.tolist()
        assert len(set(places)) == len(places) and 0 not in places and 0 not in saved
        for state, place in zip(saved, places, strict=True):
            assert self.states[state] is not None, "a state is saved that no one made"
            self.host_states[place] = self.states[state]
        self.unknown_states[step] = places
        self.unknown_fetches[step] = copies.fetch_from.tolist()
        fetched = copies.fetch_to.tolist()
        assert set(fetched) <= set(copies.owned.tolist()) and not set(fetched) & set(copies.load_to.tolist())
        self._copy_states([self.host_states[place] for place in copies.fetch_from], copies.fetch_to)

    def _copy_states(self, contents: list[bytes | None], places: np.ndarray) -> None:
        for content, place in zip(contents, places.tolist(), strict=True):
            assert content is not None, "a state is copied that no one made"
            self.states[place] = content

    def _stored(self, slot: int, length: int) -> list[int]:
        """The slot's first tokens, as its pages have them."""
        rows = self.table[slot, : -(-length // self.page_size)]
        return self.pages[rows].reshape(-1)[:length].tolist()

    def _context(self, row: Row, node: int) -> list[int]:
        """What a token of the row sees: all before the row, and the row's tokens on its way."""
        path = []
        while node >= 0:
            path.append(row.start + node)
            node = row.parents[node]
        stored = self._stored(row.slot, row.start + len(row.tokens))
        return stored[: row.start] + [stored[position] for position in reversed(path)]

    def _sample(self, row: Row) -> list[int]:
        """Accepts drafts along the path of what is sampled, and moves that path to the row's beginning."""
        node = len(row.tokens) - 1
        if row.samples is Samples.LAST:
            for draft in range(1, len(row.tokens)):
                assert not row.is_drafted or row.tokens[draft] == next_token(self._context(row, draft - 1)), (
                    "a draft that is sure is wrong"
                )
            accepted, path = [next_token(self._context(row, node))], list(range(len(row.tokens)))
        else:
            accepted, path = [next_token(self._context(row, 0))], [0]
            while children := [
                child
                for child, parent in enumerate(row.parents)
                if parent == path[-1] and row.tokens[child] == accepted[-1]
            ]:
                path.append(children[0])
                accepted.append(next_token(self._context(row, path[-1])))
        context = self._context(row, path[-1])
        assert min(context) >= 0, "a row reads what no one wrote"
        self._compact(row, path)
        self.lengths[row.slot] = row.start + len(path)
        self.last_token[row.slot] = accepted[-1]
        return accepted

    def _compact(self, row: Row, path: list[int]) -> None:
        for pages, table in ((self.pages, self.table), (self.window_pages, self.window_table)):
            if len(pages):
                places = [
                    (table[row.slot, at // self.page_size], at % self.page_size)
                    for at in range(row.start, row.start + len(row.tokens))
                ]
                kept = [pages[places[node]] for node in path]
                for place, content in zip(places, kept, strict=False):
                    pages[place] = content

    def _force(self, row: Row, sampled: int) -> list[int]:
        """What a grammar would force after the row's last token, told once."""
        context = [*self._stored(row.slot, self.lengths[row.slot]), sampled]
        forced: list[int] = []
        if len(context) > self.reported_len[row.slot]:
            while len(forced) + 1 < self.longest_run and next_token([*context, *forced, 99]) % 4:
                forced.append(next_token([*context, *forced]))
            self.reported_len[row.slot] = len(context) + len(forced)
        return forced

    def _prompt_parts(self, plan: StepPlan) -> list[PromptLogprobs]:
        parts, at = [], 0
        for row in range(plan.num_decodes + plan.num_verifies, len(plan.slots)):
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
