"""What the audit finds: each kind of damage, done by hand."""

from collections.abc import Callable

import pytest

from runtime.cache.audit import IDS, PORTION, audit, findings
from runtime.cache.kv import KVCache
from tests.cache.test_host import Steps
from tests.cache.test_prefix import sequence


def used() -> Steps:
    it = Steps()
    it.run(1, 1, 2, 2, 3)
    it.plan()
    return it


def lose(cache: KVCache) -> None:
    cache.pool.allocate(1)


def double(cache: KVCache) -> None:
    cache.pool._free[0] = next(iter(cache.tree.root.children.values())).page


def lose_host(cache: KVCache) -> None:
    cache.tree.hosts.allocate(1)


def lock(cache: KVCache) -> None:
    cache.tree.lock(next(iter(cache.tree.root.children.values())))


def miscount(cache: KVCache) -> None:
    cache.tree.root.num_host_children += 1


def forget(cache: KVCache) -> None:
    cache.tree.device_queue.pop()


DAMAGE: dict[Callable[[KVCache], None], tuple[int, int, str]] = {
    lose: (1, 0, "has 0 owners"),
    double: (2, 0, "has 2 owners"),
    lose_host: (0, 1, "has 0 owners"),
    lock: (0, 0, "is locked 1 times"),
    miscount: (0, 0, "counts its children wrongly"),
    forget: (0, 0, "not in the queue"),
}


def test_a_cache_in_use_is_clean() -> None:
    it = used()
    running = sequence(1, 1, 2, 2, 3, 4)
    it.plan(running)
    assert findings(it.cache, [running]).is_clean
    assert not findings(it.cache).is_clean, "whose are the pages?"
    assert findings(KVCache(5, 2)).is_clean


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_quarantined(damage: Callable[[KVCache], None]) -> None:
    it = used()
    damage(it.cache)
    found = findings(it.cache)
    num_pages, num_hosts, words = DAMAGE[damage]
    assert (len(found.pages), len(found.hosts)) == (num_pages, num_hosts) and any(
        words in message for message in found.messages
    )
    it.cache.quarantine(found.pages, found.hosts)
    assert findings(it.cache).is_clean and not it.cache.tree.root.children
    assert (it.cache.pool.num_free, it.cache.tree.hosts.num_free) == (8 - num_pages, 8 - num_hosts)
    assert not found.pages & set(it.cache.pool.allocate(8 - num_pages))


def test_what_is_read_outside_is_no_damage() -> None:
    it = used()
    it.confirm()
    node = next(iter(it.cache.tree.root.children.values()))
    node.pins += 1
    (reserved,) = it.cache.host.reserve(1)
    found = findings(it.cache)
    assert found.is_clean and found.busy == {node.host, reserved}


def test_an_audit_comes_in_portions() -> None:
    """Nodes, free pages, and pages whose owners are compared are each looked at by portions."""
    it = Steps(num_pages=3 * IDS)
    it.run(*range(2 * 4 * PORTION + 3))
    assert sum(1 for _ in audit(it.cache)) >= 4 + 3 + 3
    found = 0
    for _ in audit(it.cache):
        found += 1
        lose(it.cache)
    assert found and not findings(it.cache).is_clean


def test_pages_that_no_pool_has_are_found() -> None:
    it = used()
    it.cache.quarantine({2}, set())
    it.cache.pool._free += [2, 99]
    found = findings(it.cache)
    assert found.pages == {2, 99} and "page 99 has 1 owners" in found.messages
