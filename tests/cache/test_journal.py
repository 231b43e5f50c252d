"""What the journal says, read from its msgpack as a router would: plain lists."""

from array import array
from random import Random
from typing import Any

import msgspec

from runtime.cache.journal import Journal
from runtime.cache.namespace import namespace
from runtime.cache.prefix import Node, PrefixTree
from tests.cache.router import Router
from tests.cache.walk import held


def tree() -> PrefixTree:
    tree = PrefixTree(2)
    tree.journal = Journal(2)
    return tree


def grow(tree: PrefixTree, tokens: list[int], namespace: str = "") -> Node:
    node = tree.enter(namespace)
    tree.lock(node)
    for start in range(0, len(tokens), 2):
        node = tree.extend(node, array("i", tokens[start : start + 2]).tobytes(), tree.num_pages + 1)
    return node


def recorded(tree: PrefixTree) -> list[Any]:
    assert tree.journal is not None
    events: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(tree.journal.take().events))
    return events


def test_a_path_is_one_event() -> None:
    t = tree()
    grow(t, [1, 2, 3, 4])
    ((tag, hashes, *rest),) = recorded(t)
    assert (tag, *rest) == ("BlockStored", None, [1, 2, 3, 4], 2, None, "GPU", None, None)
    assert len(set(hashes)) == 2 and all(0 <= h < 2**63 for h in hashes)
    grow(t, [1, 2, 3, 4, 5, 6])
    assert recorded(t)[0][:4] == [
        "BlockStored",
        [t.journal.hashes[t.match("", array("i", [1, 2, 3, 4, 5, 6]), 3)]],
        hashes[1],
        [5, 6],
    ], "it says what is new only, and whose child it is"
    grow(t, [1, 2])
    assert t.journal.is_empty


def test_branches_are_events_of_their_own() -> None:
    t = tree()
    grow(t, [1, 2, 3, 4])
    grow(t, [1, 2, 5, 6])
    one, other = recorded(t)
    assert other[2] == one[1][0] and other[3] == [5, 6]


def test_hashes_are_the_same_everywhere_and_depend_on_all_before() -> None:
    hashes = []
    for tokens in ([1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 3, 4]):
        t = tree()
        grow(t, tokens)
        hashes.append(recorded(t)[0][1])
    assert hashes[0] == hashes[1] and not set(hashes[0]) & set(hashes[2])


def test_removal() -> None:
    t = tree()
    t.unlock(grow(t, [1, 2, 3, 4]))
    ((_, hashes, *_),) = recorded(t)
    t.evict(2)
    assert recorded(t) == [["BlockRemoved", hashes[::-1], "GPU"]]
    assert not t.journal.hashes


def test_a_removal_ends_a_path() -> None:
    """Else its pages would be told in another order than they came."""
    t = tree()
    t.unlock(grow(t, [9, 9]))
    node = grow(t, [1, 2])
    recorded(t)
    node = t.extend(node, array("i", [3, 4]).tobytes(), 7)
    t.evict(1)
    t.extend(node, array("i", [5, 6]).tobytes(), 8)
    assert [event[0] for event in recorded(t)] == ["BlockStored", "BlockRemoved", "BlockStored"]


def test_namespaces_are_distinguished_and_not_reported() -> None:
    t = tree()
    secret = namespace(salt="a long secret salt " * 5)
    grow(t, [1, 2])
    grow(t, [1, 2, 3, 4], secret)
    plain, salted = recorded(t)
    assert plain[3:] == [[1, 2], 2, None, "GPU", None, None]
    *_, medium, lora_name, extra = salted
    assert (medium, lora_name, extra[1]) == ("GPU", None, None) and "secret" not in str(extra) and extra[0]
    assert not set(plain[1]) & set(salted[1]) and salted[2] is None


def test_clearing_forgets_what_was_not_reported() -> None:
    t = tree()
    recorded(t)
    grow(t, [1, 2])
    t.journal.cleared()
    assert recorded(t) == [["AllBlocksCleared"]] and not t.journal.hashes


def test_numbers_have_no_gaps() -> None:
    journal = Journal(2)
    assert [journal.take().number for _ in range(3)] == [0, 1, 2]


def test_a_router_knows_what_the_tree_holds() -> None:
    """Random growth and eviction, told in random pieces."""
    random, t, router = Random(1), tree(), Router()
    for _ in range(400):
        salt = random.choice(["", "a"])
        t.unlock(grow(t, [random.randrange(2) for _ in range(2 * random.randrange(1, 6))], salt))
        if random.random() < 0.4:
            t.evict(random.randrange(8))
        if random.random() < 0.3:
            router.take(recorded(t))
            assert router.prefixes() == held(t)
    assert router.num_removed > 100
