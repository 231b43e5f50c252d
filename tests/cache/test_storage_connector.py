"""The interface for a storage tier; tests/scheduling/storing.py drives them at random."""

import sys
from types import FrameType

import pytest

from runtime.cache.host import HostConfig
from runtime.cache.kv import CacheConfig, KVCache
from runtime.cache.storage_connector import Pin, StorageConnector
from tests.cache.test_host import Steps, counts
from tests.cache.test_prefix import sequence

PROMPT = (1, 1, 2, 2, 3, 3, 4)


def storing(num_pages: int = 9, num_host_pages: int = 9) -> tuple[Steps, StorageConnector]:
    it = Steps(num_pages=num_pages, num_host_pages=num_host_pages)
    it.cache.host.has_storage = True
    return it, StorageConnector(lambda: it.cache, b"model")


def saved(it: Steps, connector: StorageConnector, *tokens: int) -> list[Pin]:
    """Pins of the pages of a prompt that has just gone."""
    it.run(*tokens)
    it.plan()
    it.confirm()
    return connector.confirmed()


def test_keys_name_the_content() -> None:
    it, connector = storing()
    before = connector.wanted(sequence(*PROMPT))
    pins = saved(it, connector, *PROMPT)
    assert (before.first, before.keys) == (0, [pin.key for pin in pins]) and len({*before.keys}) == 3
    after = connector.wanted(sequence(*PROMPT, 4, 5))
    assert after.first == 3 and len(after.keys) == 1
    assert StorageConnector(lambda: KVCache(9, 2), b"model").wanted(sequence(*PROMPT)) == before, (
        "in another process as well"
    )
    other_model, other_tokens = (
        StorageConnector(lambda: KVCache(9, 2), name).wanted(sequence(9, *PROMPT))
        for name in (b"other", b"model")
    )
    other_namespace = connector.wanted(sequence(*PROMPT, namespace="n"))
    assert len({*before.keys, *other_model.keys, *other_tokens.keys, *other_namespace.keys}) == 12


def test_the_page_of_the_last_token_is_wanted_where_the_next_token_comes_as_well() -> None:
    """Else that token is computed here, for the logits behind it."""
    it, connector = storing()
    whole, longer = PROMPT[:6], (*PROMPT[:6], 4)
    for tokens, expected in ((whole, [2, 3]), (longer, [3, 3])):
        found = [connector.wanted(sequence(*tokens), has_next=has_next) for has_next in (False, True)]
        assert [len(one.keys) for one in found] == expected
    assert connector.wanted(sequence(*whole), has_next=True) == connector.wanted(sequence(*longer))
    saved(it, connector, *longer)
    assert connector.wanted(sequence(*whole), has_next=True).keys == [], "it is here"


def test_frames_that_are_kept_hold_no_tokens() -> None:
    """As tests/scheduling/test_scheduler.py: a sequence grows while frames of a profiler live."""
    it, connector = storing()
    it.run(*PROMPT)
    one, frames = sequence(*PROMPT), list[FrameType]()
    sys.setprofile(lambda frame, event, _: frames.append(frame) if event == "call" else None)
    try:
        wanted = connector.wanted(one)
        connector.adopt(one, wanted.first, connector.reserve(1), 1)
    finally:
        sys.setprofile(None)
    assert {"wanted", "adopt", "child"} <= {frame.f_code.co_name for frame in frames}
    one.tokens.append(1)


def test_a_long_path_is_no_deep_recursion() -> None:
    it, connector = storing(4000, 4000)
    it.run(*range(6001))
    node = it.cache.tree.root
    while node.children:
        (node,) = node.children.values()
    empty = StorageConnector(lambda: KVCache(9, 2), b"model")
    assert node.depth == 3000 and connector.key(node) == empty.wanted(sequence(*range(6001))).keys[-1]


def test_confirmed_pages_are_reported_once_and_pinned() -> None:
    it, connector = storing(num_host_pages=3)
    pins = saved(it, connector, 1, 1, 2, 2, 3)
    assert [pin.host for pin in pins] == [1, 2] and connector.confirmed() == []
    it.run(5, 5, 6)
    assert it.plan() is None, "both host pages are being read"
    for pin in pins:
        pin.release()
    it.run(7, 7, 8)
    assert counts(it.plan()) == (1, 0)


def test_a_pinned_page_outlives_its_node() -> None:
    it, connector = storing()
    (pin,) = saved(it, connector, 1, 1, 2)
    it.cache.tree.evict(9)
    it.cache.tree.drop_host(pin.node)
    assert not pin.is_current and it.cache.host.num_used == 1
    pin.release()
    assert it.cache.host.num_used == 0


def test_adopted_pages_are_loaded() -> None:
    it, connector = storing()
    newcomer = sequence(*PROMPT)
    reserved = connector.reserve(3)
    assert connector.adopt(newcomer, 0, reserved, 2) == 2 and it.cache.host.num_used == 2
    assert counts(it.plan(newcomer)) == (0, 2)
    assert (newcomer.loaded_len, newcomer.cached_len, newcomer.fetched_len) == (4, 4, 4)


def test_what_was_computed_meanwhile_is_not_adopted_over() -> None:
    it, connector = storing()
    reserved = connector.reserve(3)
    saved(it, connector, 1, 1, 2, 2, 7)
    assert connector.adopt(sequence(*PROMPT), 0, reserved, 3) == 1, "two pages are there"
    assert it.cache.host.num_used == 3


def test_pages_whose_beginning_is_gone_come_back() -> None:
    it, connector = storing()
    for pin in saved(it, connector, 1, 1, 9):
        pin.release()
    newcomer = sequence(*PROMPT)
    assert connector.wanted(newcomer).first == 1
    reserved = connector.reserve(2)
    it.cache.flush()
    assert connector.adopt(newcomer, 1, reserved, 2) == 0 and it.cache.host.num_used == 0
    assert set(it.cache.tree.roots) == {""} and not it.cache.tree.root.children


@pytest.mark.parametrize("count", [0, 2])
def test_what_is_of_another_host_memory_changes_nothing(count: int) -> None:
    it, connector = storing()
    pins = saved(it, connector, 1, 1, 2)
    reserved = connector.reserve(2)
    it.cache = KVCache(9, 2, CacheConfig(host=HostConfig(num_pages=5)))
    pins[0].release()
    assert connector.adopt(sequence(*PROMPT), 0, reserved, count) == 0
    assert it.cache.host.num_used == 0 and it.cache.tree.hosts.num_free == 4


def test_nothing_is_wanted_where_nothing_is_shared() -> None:
    connector = StorageConnector(lambda: KVCache(9, 2, CacheConfig(shares=False)), b"")
    assert connector.wanted(sequence(*PROMPT)).keys == []
