"""Which server a policy chooses."""

from collections import Counter
from random import Random

import pytest

from runtime.errors import InvalidRequest
from runtime.routing.policies import POLICIES, Policy, PolicySettings
from runtime.routing.prefix_index import BLOCK_BYTES, MAX_BLOCKS, PrefixIndex, keys_of
from runtime.routing.worker import Worker


def workers(*loads: int) -> list[Worker]:
    """Servers with so many requests each."""
    found = [Worker(f"http://10.0.0.{number}:8000") for number in range(len(loads))]
    for worker, load in zip(found, loads, strict=True):
        worker.load = load
    return found


def policy(name: str, **settings: float) -> Policy:
    return POLICIES[name](PolicySettings(**settings), Random(0))  # type: ignore[arg-type]


def text(*words: str) -> bytes:
    """A text of so many whole blocks, one for each word."""
    return b"".join(word.encode().ljust(BLOCK_BYTES, b".") for word in words)


def test_round_robin_takes_one_after_the_other() -> None:
    servers, own = workers(9, 0, 0), policy("round_robin")
    assert [own.choose(servers, b"") for _ in range(4)] == [*servers, servers[0]]


def test_least_load_and_power_of_two_look_at_loads() -> None:
    servers = workers(3, 1, 2)
    assert policy("least_load").choose(servers, b"") is servers[1]
    counts = Counter(policy_choice.url for policy_choice in _many("power_of_two", servers))
    assert set(counts) == {servers[1].url, servers[2].url}, "the most loaded one of two is never taken"
    assert len(Counter(choice.url for choice in _many("random", servers))) == 3
    alone = workers(5)
    assert policy("power_of_two").choose(alone, b"") is alone[0]


def _many(name: str, servers: list[Worker]) -> list[Worker]:
    own = policy(name)
    return [own.choose(servers, b"") for _ in range(100)]


def test_cache_aware_sends_equal_beginnings_to_one_server() -> None:
    servers, own = workers(0, 0, 0), policy("cache_aware")
    first = own.choose(servers, text("system", "a", "b"))
    first.load += 1
    second = own.choose(servers, text("another", "c", "d"))
    assert second is not first, "an unknown beginning goes to the least loaded server"
    second.load += 2
    assert own.choose(servers, text("system", "a", "e")) is first
    assert own.choose(servers, text("another", "c", "d", "f")) is second
    # a fourth of the text is less than cache_threshold
    assert own.choose(servers, text("system", "x", "y", "z")) not in (first, second)


def test_cache_aware_gives_way_to_balance_and_forgets() -> None:
    servers = workers(0, 0)
    own = policy("cache_aware", balance_abs_threshold=3, balance_rel_threshold=1.5)
    known = own.choose(servers, text("system"))
    other = next(one for one in servers if one is not known)
    known.load = 3
    assert own.choose(servers, text("system")) is known, "no more than 3 apart"
    known.load = 4
    assert own.choose(servers, text("system")) is other, "now both know it"
    known.load, other.load = 14, 10
    assert own.choose(servers, text("system")) in servers, "4 apart, and less than half as much again"
    own.forget(known)
    known.load = other.load = 0
    assert all(own.choose(servers, text("system", "b")) is other for _ in range(3))


def test_the_index_is_bounded_and_ends_go_first() -> None:
    index = PrefixIndex(3)
    long = keys_of(text("a", "b", "c", "d"))
    index.insert(long, "x")
    assert len(index) == 3
    assert index.match(long, ["x"]) == ("x", 0.75), "the end was left out, not the beginning"
    index.insert(keys_of(text("e")), "y")
    assert index.match(long, ["x", "y"]) == ("x", 0.5)
    assert index.match(long, ["y"]) == (None, 0.0)
    index.remove("x")
    assert len(index) == 1
    assert len(keys_of(b"z" * (MAX_BLOCKS + 9) * BLOCK_BYTES)) == MAX_BLOCKS
    assert len(keys_of(b"")) == len(keys_of(b"short")) == 1
    assert keys_of(text("a") + b"rest") == keys_of(text("a"))


@pytest.mark.parametrize(
    "url", ["10.0.0.1:80", "ftp://x", "http://", "http://u:p@x", "http://x?q=1", "http://x:99999", "http://ä"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="URL"):
        Worker(url)


def test_urls_name_host_port_and_path() -> None:
    worker = Worker("https://example.org/v2/")
    assert (worker.host, worker.port, worker.has_tls, worker.root_path) == ("example.org", 443, True, "/v2")
    assert Worker("http://[::1]:81").host == "::1"
