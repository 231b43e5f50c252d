"""The policies as tables of cases: waiting sequences in, order out."""

import pytest

from runtime.cache.prefix import PrefixTree
from runtime.cache.sequence import Sequence
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.scheduling.order import POLICIES, WINDOW, Now, heaviest_prefix, longest_prefix
from runtime.scheduling.shares import MAX_TENANTS, Shares
from runtime.scheduling.waiting import AGED_EVERY, AGED_LEVEL, OrderConfig, WaitingQueue

PAGE = 2


def tree_of(*prompts: list[int]) -> PrefixTree:
    tree = PrefixTree(PAGE)
    for number, prompt in enumerate(prompts):
        node = tree.root
        tree.lock(node)
        for start in range(0, len(prompt) // PAGE * PAGE, PAGE):
            node = tree.extend(
                node, sequence(0, prompt[start : start + PAGE]).tokens.tobytes(), 100 * number + start + 1
            )
        tree.unlock(node)
    return tree


def sequence(id: int, prompt: list[int], max_new: int = 10, **fields: object) -> Sequence:
    request = Request(id=str(id), prompt_ids=prompt, params=SamplingParams(), seed=0, arrival_s=0, **fields)
    return Sequence(id, request, 0, len(prompt) + max_new, frozenset())


def queue(
    order: OrderConfig,
    tree: PrefixTree | None = None,
    running_keys: dict[str, int] | None = None,
    shares: Shares | None = None,
) -> WaitingQueue:
    shares = shares or Shares(is_on=order.fair, weights=order.weights)
    return WaitingQueue(order, Now(tree or PrefixTree(PAGE), running_keys or {}), shares)


def drain(waiting: WaitingQueue) -> list[int]:
    taken = []
    while (head := waiting.head()) is not None:
        assert waiting.head() is head, "the head stays until something changes"
        taken.append(head.id)
        waiting.take(head)
    assert not waiting and not waiting.has_ready
    return taken


PROMPTS = [[1, 1, 1, 1, 9], [2, 2, 2, 2, 9], [1, 1, 3, 3, 9], [1, 1, 1, 1, 8], [4, 4, 9]]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", [0, 1, 2, 3, 4]),
        ("priority", [0, 1, 2, 3, 4]),
        ("lof", [3, 0, 1, 4, 2]),
        ("lpm", [1, 0, 2, 3, 4]),  # cached: [2 2 2 2], [1 1]
        ("dfs-weight", [0, 3, 2, 1, 4]),
        ("routing-key", [2, 0, 4, 1, 3]),
    ],
)
def test_policies(policy: str, expected: list[int]) -> None:
    keys = ["a", "", "b", "", "a"]
    waiting = queue(OrderConfig(policy=policy), tree_of([2, 2, 2, 2], [1, 1]), {"a": 1, "b": 3})
    for i, prompt in enumerate(PROMPTS):
        waiting.add(sequence(i, prompt, max_new=[5, 5, 1, 9, 2][i], routing_key=keys[i]))
    assert drain(waiting) == expected


def test_random_is_an_order_of_its_own_and_repeats() -> None:
    orders = []
    for _ in range(2):
        waiting = queue(OrderConfig(policy="random", patience=0))
        for i in range(100):
            waiting.add(sequence(i, [1]))
        orders.append(drain(waiting))
    assert orders[0] == orders[1] != sorted(orders[0]) and sorted(orders[0]) == list(range(100))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_takes_each_once(policy: str) -> None:
    waiting = queue(OrderConfig(policy=policy))
    for i in range(3 * WINDOW):
        waiting.add(sequence(i, [i % 3, i % 3, i % 5, i % 5, 7], routing_key=str(i % 4)))
    assert sorted(drain(waiting)) == list(range(3 * WINDOW))


@pytest.mark.parametrize(("low_first", "expected"), [(False, [2, 0, 3, 1]), (True, [3, 0, 2, 1])])
def test_priorities(low_first: bool, expected: list[int]) -> None:
    """Those without one come last either way; negative and huge ones are numbers like others."""
    waiting = queue(OrderConfig(has_priorities=True, low_first=low_first))
    for i, priority in enumerate([0, None, 2**63 - 1, -5]):
        added = sequence(i, [1], priority=priority)
        added.level = waiting.order.level(priority)
        waiting.add(added)
    assert drain(waiting) == expected


def test_who_gave_way_goes_before_the_new_of_its_level() -> None:
    waiting = queue(OrderConfig(policy="lof"))
    waiting.add(sequence(0, [1], max_new=50))
    waiting.add(sequence(2, [1], max_new=1), is_new=False)
    waiting.add(sequence(1, [1], max_new=2), is_new=False)
    assert drain(waiting) == [1, 2, 0]


def test_suspended_ones_count_but_are_not_taken() -> None:
    waiting = queue(OrderConfig())
    suspended = sequence(0, [1])
    waiting.add_suspended(suspended)
    assert len(waiting) == 1 and waiting.head() is None
    waiting.add(suspended)
    assert drain(waiting) == [0]


def test_no_request_is_overtaken_more_often_than_patience_allows() -> None:
    """Requests of a better priority keep coming, faster than they are taken."""
    waiting = queue(OrderConfig(has_priorities=True, patience=20))
    poor = sequence(0, [1], priority=-1)
    poor.level = 1
    waiting.add(poor)
    for i in range(1, 200):
        rich = sequence(i, [1], priority=1)
        rich.level = -1
        waiting.add(rich)
        head = waiting.head()
        assert head is not None
        waiting.take(head)
        if head is poor:
            break
    assert i == 21 and poor.level == AGED_LEVEL and waiting.num_aged == 1


def test_the_aged_do_not_push_everybody_else_aside() -> None:
    waiting = queue(OrderConfig(has_priorities=True, patience=1))
    for i in range(200):
        added = sequence(i, [1], priority=i // 100)
        added.level = -(i // 100)
        waiting.add(added)
    taken = drain(waiting)[:80]
    assert sum(i < 100 for i in taken) == 80 // AGED_EVERY


def test_probe_costs_what_has_changed() -> None:
    tree = tree_of([1, 1, 2, 2])
    a, b = sequence(0, [1, 1, 2, 2, 3, 3, 9]), sequence(1, [5, 5, 9])
    now = Now(tree, {})
    assert longest_prefix([b, a], now) == [a, b] and a.match.depth == 2
    tree.evict(2)
    longest_prefix([a, b], now)
    assert a.match.depth == 0, "an evicted prefix counts no more"
    assert tree.num_evictable == 0


def test_heaviest_prefix_ends_with_prompts_that_are_the_same() -> None:
    same = [sequence(i, [1, 2, 3, 4]) for i in range(5)]
    now = Now(PrefixTree(PAGE), {})
    assert heaviest_prefix(same, now) == same
    assert [
        s.id
        for s in heaviest_prefix([sequence(0, [1, 2]), sequence(1, [1, 3, 4]), sequence(2, [1, 3, 5])], now)
    ] == [1, 2, 0]


def test_clocks() -> None:
    shares = Shares(is_on=True, weights={"big": 2.0})
    for name in ("big", "small"):
        shares.join(name, 1)
    for name in ("big", "small"):
        shares.charge(name, 100)
    assert (shares.clock("big"), shares.clock("small")) == (50, 100)
    shares.join("new", 1)
    assert shares.clock("new") == 50, "no one can save up by staying away"
    shares.leave("small")
    shares.join("small", 1)
    assert shares.clock("small") == 100, "nor get rid of what was used by leaving"
    assert shares.tokens == {"big": 100, "small": 100, "new": 0}


def test_clocks_do_not_pile_up() -> None:
    shares = Shares(is_on=True)
    shares.join("stays", 1)
    for i in range(5 * MAX_TENANTS):
        shares.join(str(i), 1)
        shares.charge(str(i), i)
        shares.leave(str(i))
    assert len(shares.tokens) <= 2 * MAX_TENANTS + 1 and "stays" in shares.tokens


@pytest.mark.parametrize("weights", [{}, {"a": 3.0}])
def test_tenants_get_shares_by_weight(weights: dict[str, float]) -> None:
    shares = Shares(is_on=True, weights=weights)
    waiting = queue(OrderConfig(fair=True, patience=0), shares=shares)
    for i in range(400):
        tenant = "b" if i % 10 else "a"
        shares.join(tenant, 1)
        waiting.add(sequence(i, [1], tenant=tenant))
    taken = {"a": 0, "b": 0}
    while taken["a"] < 30:
        head = waiting.head()
        assert head is not None
        waiting.take(head)
        shares.charge(head.request.tenant, 10)
        taken[head.request.tenant] += 1
    assert abs(taken["a"] / taken["b"] - weights.get("a", 1.0)) < 0.2
