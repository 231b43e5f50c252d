"""The host tier of the cache, step by step; tests/scheduling drives all of it at random against a rank that
remembers."""

from collections.abc import Iterator

import numpy as np
import pytest

from runtime.cache.host import SAVES_PER_STEP, HostConfig
from runtime.cache.kv import CacheConfig, KVCache
from runtime.cache.node import Node
from runtime.cache.sequence import Sequence
from runtime.messages.steps import PageCopies
from tests.cache.test_prefix import key, sequence


class Steps:
    """A cache of pages of two tokens, and the plans made over it."""

    def __init__(
        self,
        policy: str = "write_through",
        *,
        num_pages: int = 9,
        num_host_pages: int = 9,
        saves_in_step: bool = False,
    ) -> None:
        host = HostConfig(num_pages=num_host_pages, write_policy=policy, saves_in_step=saves_in_step)
        self.cache = KVCache(num_pages, 2, CacheConfig(host=host))
        self.step = 0

    def plan(self, *newcomers: Sequence) -> PageCopies | None:
        """One plan that admits and computes `newcomers`."""
        self.step += 1
        self.cache.host.begin()
        for newcomer in newcomers:
            assert self.cache.missing(newcomer) <= self.cache.num_available
            self.cache.admit(newcomer, use_prefix=True)
            newcomer.computed_len = len(newcomer.tokens)
            self.cache.publish(newcomer)
        return self.cache.host.take(self.step)

    def run(self, *tokens: int) -> Sequence:
        """A sequence that comes, is computed and goes."""
        it = sequence(*tokens)
        self.plan(it)
        self.cache.release(it)
        return it

    def confirm(self) -> None:
        self.cache.host.confirm(self.step)


def counts(page_copies: PageCopies | None) -> tuple[int, int]:
    return (0, 0) if page_copies is None else (len(page_copies.save_pages), len(page_copies.load_pages))


def test_write_through_saves_with_the_next_plan() -> None:
    it = Steps()
    first = sequence(1, 2, 3, 4, 5)
    assert it.plan(first) is None, "it is computed by this step"
    page_copies = it.plan()
    assert (
        page_copies is not None
        and page_copies.save_pages.tolist() == first.pages[:2]
        and sorted(page_copies.save_hosts) == [1, 2]
    )
    assert it.plan() is None, "once"


def test_pages_that_others_wait_for_are_saved_by_the_step_that_computes_them() -> None:
    it = Steps(saves_in_step=True, num_host_pages=3)
    first = sequence(1, 2, 3, 4, 5)
    page_copies = it.plan(first)
    assert page_copies is not None and not len(page_copies.save_pages)
    assert page_copies.computed_pages.tolist() == first.pages[:2]
    node = first.node
    assert node is not None and node.host and node.save_step == it.step
    it.confirm()
    assert not node.save_step and it.plan() is None, "once"
    it.cache.release(first)
    second = sequence(6, 7, 8)
    page_copies = it.plan(second)  # takes the room of the oldest one
    assert page_copies is not None and page_copies.computed_pages.tolist() == second.pages[:1]
    it.confirm()
    it.cache.release(second)
    longer = sequence(9, 9, 8, 8, 7, 7, 6)
    page_copies = it.plan(longer)
    assert page_copies is not None and page_copies.computed_pages.tolist() == longer.pages[:2]
    assert it.plan() is None, "the first pages of a prompt keep their room"


def test_parts_of_computed_pages_are_known_while_their_step_runs() -> None:
    it = Steps(saves_in_step=True)
    page_copies = it.plan(sequence(1, 2, 3, 4, 5))
    assert page_copies is not None and page_copies.notice_bytes
    parts = it.cache.host.saved_parts
    for step, rank, num_parts in ((it.step, 0, 2), (it.step, 1, 1), (it.step, 1, 3), (it.step + 1, 0, 9)):
        parts.add(step, rank, num_parts)
    assert parts.of(it.step) == {0: 2, 1: 3} and parts.of(it.step + 1) == {}
    it.confirm()
    parts.add(it.step, 0, 4)
    assert parts.of(it.step) == {}, "its result has come"
    it.plan(sequence(6, 7, 8))
    parts.add(it.step, 0, 2)
    it.cache.lose_device()
    assert parts.of(it.step) == {}, "the ranks have died"


def test_selective_saves_what_a_second_sequence_finds() -> None:
    it = Steps("write_through_selective")
    it.run(1, 2, 3, 4, 5)
    assert it.plan() is None
    assert it.plan(sequence(1, 2, 9)) is None
    assert counts(it.plan()) == (1, 0), "the page that both have in common"


def test_write_back_saves_what_must_leave() -> None:
    it = Steps("write_back", num_pages=5)
    it.run(1, 2, 3, 4, 5)
    assert it.plan() is None
    page_copies = it.plan(sequence(6, 6, 7, 7, 8))
    assert counts(page_copies) == (1, 0), "one of the two cached pages had to go"
    assert it.cache.tree.num_pages == 1 + 2


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_left_the_device_comes_back(policy: str) -> None:
    it = Steps(policy, num_pages=5)
    it.run(1, 2, 3, 4, 5)
    it.run(6, 6, 7, 7, 8)
    it.run(9, 9, 9, 9, 9)
    again = sequence(1, 2, 3, 4, 5)
    assert (it.cache.missing(again), it.cache.num_available) == (3, 4), (
        "what is in host memory only needs pages as well"
    )
    page_copies = it.plan(again)
    assert page_copies is not None and page_copies.load_pages.tolist() == again.pages[:2]
    assert (again.cached_len, again.loaded_len, len(again.pages)) == (4, 4, 3)
    twin = sequence(1, 2, 3, 4, 5)
    assert counts(it.plan(twin))[1] == 0 and (twin.cached_len, twin.loaded_len) == (4, 0), (
        "it is on the device now"
    )


def test_no_plan_uses_a_host_page_twice() -> None:
    """Loads from two host pages, while the pages they are loaded to have to be saved in a full host
    memory."""
    it = Steps("write_back", num_pages=5, num_host_pages=4)
    for base in range(10, 60, 10):
        it.run(base, base, base + 1, base + 1, base)
    page_copies = it.plan(sequence(40, 40, 41, 41, 40))
    assert page_copies is not None
    touched = [*page_copies.save_hosts.tolist(), *page_copies.load_hosts.tolist()]
    assert len(touched) == len(set(touched)) and len(page_copies.load_hosts) > 0


def test_the_oldest_leaves_of_host_memory_go_first() -> None:
    it = Steps(num_host_pages=4)
    it.run(1, 1, 2, 2, 3)
    it.run(5, 5, 6)
    it.plan()
    it.run(7, 7, 8)
    it.plan()
    with_host_pages = {
        node.key: node.host for root in it.cache.tree.roots.values() for node in walk(root) if node.host
    }
    assert [np.frombuffer(key, dtype=np.int32)[0] for key in with_host_pages] == [1, 5, 7], (
        "the leaf of the oldest path made room"
    )


def walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children.values():
        yield from walk(child)


def test_saves_come_in_portions() -> None:
    it = Steps(num_pages=1000, num_host_pages=1000)
    it.run(*range(2 * 600 + 1))
    assert [counts(it.plan())[0] for _ in range(4)] == [
        SAVES_PER_STEP,
        SAVES_PER_STEP,
        600 - 2 * SAVES_PER_STEP,
        0,
    ]


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_what_is_certainly_saved_outlives_the_ranks(is_confirmed: bool) -> None:
    it = Steps()
    it.run(1, 2, 3, 4, 5)
    it.plan()
    if is_confirmed:
        it.confirm()
    it.cache.lose_device()
    it.cache.resume(6)
    assert (it.cache.pool.num_free, it.cache.tree.num_pages, it.cache.host.num_used) == (
        5,
        0,
        2 * is_confirmed,
    )
    again = sequence(1, 2, 3, 4, 5)
    assert counts(it.plan(again)) == (0, 2 * is_confirmed)
    assert again.loaded_len == 4 * is_confirmed


def test_a_page_saved_again_is_not_confirmed_by_the_first_time() -> None:
    """Its only host page had another owner in between."""
    it = Steps("write_back", num_host_pages=2)
    host = it.cache.host
    one, other = (
        it.run(token, token, 0) and it.cache.tree.root.children[key(token, token)] for token in (1, 2)
    )
    for node in (one, other, one):
        host.save(node)
        it.plan()
    host.confirm(it.step - 2)
    assert one.host and one.save_step == it.step
    host.confirm(it.step)
    assert not one.save_step and not other.host


def test_a_sequence_that_takes_no_prefix_brings_the_page_back() -> None:
    it = Steps(num_pages=5)
    it.run(1, 1, 2, 2, 3)
    it.plan()
    it.cache.pool.release(it.cache.tree.evict(2))
    assert it.cache.tree.num_pages == 0
    plain = sequence(1, 1, 2, 2, 3)
    it.cache.host.begin()
    it.cache.admit(plain, use_prefix=False)
    plain.computed_len = 5
    it.cache.publish(plain)
    assert (it.cache.tree.num_pages, plain.node.depth, it.cache.host.num_used) == (2, 2, 2)
    assert it.cache.host.take(9) is None, "host memory has it still"


def test_flush_empties_host_memory() -> None:
    it = Steps()
    it.run(1, 1, 2, 2, 3)
    it.plan()
    running = sequence(5, 5, 6)
    it.plan(running)
    it.plan()
    assert it.cache.host.num_used == 3
    assert it.cache.flush() == 2
    assert it.cache.host.num_used == 0 and it.cache.tree.num_pages == 1


def test_reserved_pages_are_touched_by_no_step_in_flight() -> None:
    it = Steps(num_host_pages=4)
    it.run(1, 1, 2, 2, 3)
    it.plan()
    assert len(it.cache.host.reserve(3)) == 1, "the others are being written"
    it.confirm()
    assert len(it.cache.host.reserve(3)) == 2
    assert it.cache.host.num_used == 3
