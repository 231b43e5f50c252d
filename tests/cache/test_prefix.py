from array import array

import pytest

from runtime.cache.kv import KVCache
from runtime.cache.namespace import namespace
from runtime.cache.pages import PagePool
from runtime.cache.prefix import Node, PrefixTree
from runtime.cache.sequence import Sequence
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams


def ids(*tokens: int) -> "array[int]":
    return array("i", tokens)


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def grow(tree: PrefixTree, *pages: tuple[tuple[int, ...], int]) -> Node:
    node = tree.root
    tree.lock(node)
    for tokens, page in pages:
        node = tree.extend(node, key(*tokens), page)
    return node


def test_match_finds_the_longest_path() -> None:
    tree = PrefixTree(2)
    node = grow(tree, ((1, 2), 10), ((3, 4), 11))
    assert tree.match("", ids(1, 2, 3, 4, 5, 6), 3).path() == [10, 11]
    assert tree.match("", ids(1, 2, 9, 9), 2).path() == [10]
    assert tree.match("", ids(2, 1), 1) is tree.root
    assert tree.match("", ids(1, 2, 3, 4), 1).path() == [10], "no deeper than asked"
    assert node.path() == [10, 11]


def test_extend_gives_the_page_that_is_there() -> None:
    tree = PrefixTree(1)
    first = grow(tree, ((1,), 10))
    assert tree.extend(tree.root, key(1), 99) is first
    assert first.locks == 2 and tree.num_pages == 1


def test_locked_paths_are_not_evicted() -> None:
    tree = PrefixTree(1)
    node = grow(tree, ((1,), 10), ((2,), 11))
    assert tree.evict(5) == [] and tree.num_evictable == 0
    tree.unlock(node)
    assert tree.num_evictable == 2
    assert tree.evict(5) == [11, 10], "leaves first"
    assert tree.num_pages == 0 and not tree.root.children


def test_least_recently_used_goes_first() -> None:
    tree = PrefixTree(1)
    for token, page in ((1, 10), (2, 11), (3, 12)):
        tree.unlock(grow(tree, ((token,), page)))
    tree.match("", ids(1), 1)
    assert [tree.evict(1) for _ in range(3)] == [[11], [12], [10]]


def test_a_parent_is_evictable_after_its_children() -> None:
    tree = PrefixTree(1)
    a = grow(tree, ((1,), 10), ((2,), 11))
    b = grow(tree, ((1,), 0), ((3,), 12))
    tree.unlock(a)
    assert tree.evict(9) == [11]
    tree.unlock(b)
    assert tree.evict(9) == [12, 10]


def test_namespaces_share_nothing_and_leave_nothing() -> None:
    cache = KVCache(30, 2)
    mine, other, plain = (
        sequence(1, 2, 3, 4, 5, namespace="a"),
        sequence(1, 2, 3, 4, 5, namespace="b"),
        sequence(1, 2, 3, 4, 5),
    )
    for s in (mine, other, plain):
        assert (
            cache.missing(s) == 3 and cache.tree.probe(s.match, s.request.namespace, ids(1, 2), 1).depth == 0
        )
        cache.admit(s, use_prefix=True)
        assert s.cached_len == 0
        s.computed_len = 5
        cache.release(s)
    assert set(cache.tree.roots) == {"", "a", "b"} and cache.tree.num_pages == 6
    again = sequence(1, 2, 3, 4, 5, namespace="a")
    cache.missing(again)
    stale = again.match
    assert (cache.flush(), set(cache.tree.roots)) == (6, {""})
    assert stale.depth == 2 and cache.tree.probe(stale, "a", ids(1, 2, 3, 4), 2).depth == 0
    cache.admit(again, use_prefix=True)
    assert cache.missing(sequence(1, 2, 3, namespace="a")) == 2 and set(cache.tree.roots) == {"", "a"}, (
        "it stays while somebody is there"
    )
    cache.release(again)
    assert set(cache.tree.roots) == {""}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"salt": "a"},
        {"tenant": "a"},
        {"adapter": "a"},
        {"weight_version": "a"},
        {"tenant": "a", "salt": "a"},
        {"salt": '["","","","a"]'},
        {"tenant": '","'},
        {"tenant": '"', "salt": ","},
    ],
)
def test_namespaces_differ_where_anything_does(parts: dict[str, str]) -> None:
    others = (
        {},
        {"salt": "a"},
        {"tenant": "a"},
        {"adapter": "a"},
        {"weight_version": "a"},
        {"tenant": '"', "salt": ","},
    )
    assert [other for other in others if namespace(**other) == namespace(**parts)] == [
        other for other in others if other == parts
    ]


def test_pool_knows_its_pages() -> None:
    pool = PagePool(5)
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4], "page 0 is padding"
    pool.release(pages)
    assert pool.num_free == 4
    with pytest.raises(AssertionError):
        pool.release([1])


def sequence(*tokens: int, max_len: int = 100, namespace: str = "") -> Sequence:
    request = Request(
        id="r", prompt_ids=list(tokens), params=SamplingParams(), seed=0, arrival_s=0, namespace=namespace
    )
    return Sequence(0, request, 0, max_len, frozenset())


def test_admit_reserves_exactly() -> None:
    cache = KVCache(5, 2)
    first = sequence(1, 2, 3)  # and room for one more: two pages
    assert cache.missing(first) == 2
    cache.admit(first, use_prefix=True)
    assert len(first.pages) == 2 and cache.num_available == 2
    first.computed_len = 3
    cache.publish(first)
    assert cache.missing(sequence(1, 2, 7)) == 1, "the first page is shared with a running sequence"
    cache.release(first)
    assert (cache.missing(sequence(1, 2, 7)), cache.num_available) == (2, 4), (
        "shared with nobody: available, and to be taken"
    )


def test_released_pages_are_found_again() -> None:
    cache = KVCache(9, 2)
    first = sequence(1, 2, 3, 4, 5)
    cache.admit(first, use_prefix=True)
    first.computed_len = 5
    cache.release(first)
    assert (cache.num_used, cache.tree.num_pages) == (2, 2)
    again = sequence(1, 2, 3, 4)
    cache.admit(again, use_prefix=True)
    assert again.cached_len == 2, "one token is always computed"
    cache.release(again)
    assert cache.flush() == 2 and cache.num_used == 0


def test_a_duplicate_is_given_up_at_release_only() -> None:
    cache = KVCache(9, 2)
    first, second = sequence(1, 2, 3), sequence(1, 2, 3)
    for s in (first, second):
        cache.admit(s, use_prefix=True)
        s.computed_len = 3
    cache.publish(first)
    before = list(second.pages)
    cache.publish(second)
    assert second.pages == before and second.node is cache.tree.root
    cache.release(second)
    cache.release(first)
    assert cache.num_used == cache.tree.num_pages == 1
