"""Which replica gets a request."""

from random import Random
from typing import Any

import pytest

from runtime.messages.balance import BalanceMethod
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.transfer import Transfer
from runtime.scheduling.balance import FIRST_ANSWERS, FIRST_TOKENS, MAX_HEADS, Balance, weight


class View:
    """A replica as balancing sees it."""

    def __init__(self, *, is_taking: bool = True, cached: int = 0) -> None:
        self.is_taking = is_taking
        self.answers = (0, 0)
        self.cached = cached

    def cached_len(self, request: Request) -> int:
        return min(self.cached, len(request.prompt_ids))


def request(
    id: str, length: int = 10, *, new: int | None = 100, n: int = 1, first: int = 1, **fields: Any
) -> Request:
    params = SamplingParams(max_new_tokens=new, n=n)
    return Request(id=id, prompt_ids=[first] * length, params=params, seed=1, arrival_s=0.0, **fields)


def test_in_turn_past_those_that_take_none() -> None:
    balance, views = Balance("round_robin", 3), [View(), View(is_taking=False), View()]
    assert [balance.choose(request(str(i)), views) for i in range(4)] == [0, 2, 0, 2]
    for view in views:
        view.is_taking = False
    assert {balance.choose(request(f"x{i}"), views) for i in range(3)} == {0, 1, 2}, "they wait somewhere"


def test_both_halves_of_a_request_follow_its_room() -> None:
    """Past a replica that takes none, and in turn without a room: warm-ups have none."""
    balance, views = Balance("follow_bootstrap_room", 3), [View(), View(), View()]
    rooms = [2**63 - 2, 7, 5, 3]
    chosen = [balance.choose(request(str(room), transfer=Transfer(room)), views) for room in rooms]
    assert chosen == [room % 3 for room in rooms]
    views[2].is_taking = False
    assert balance.choose(request("past", transfer=Transfer(5)), views) in (0, 1)
    assert [balance.choose(request(f"plain{i}"), views) for i in range(2)] in ([0, 1], [1, 0])


def test_the_fewest_requests_and_the_fewest_tokens() -> None:
    views = [View(), View()]
    by_requests, by_tokens = Balance("total_requests", 2), Balance("total_tokens", 2)
    for balance in (by_requests, by_tokens):
        assert balance.choose(request("long", 1000), views) == 0
        assert balance.choose(request("a"), views) == 1
    assert by_requests.choose(request("b"), views) == 0
    assert [by_tokens.choose(request(name), views) for name in "bcd"] == [1, 1, 1]
    by_tokens.close("long")
    by_tokens.close("long")  # it is gone already
    assert by_tokens.choose(request("e"), views) == 0 and by_tokens.held[1].requests == 4


def test_a_weight_is_the_prompt_and_the_expected_answers() -> None:
    view = View()
    assert weight(request("a", 10, new=50, n=3), [view]) == 10 + 3 * 50
    assert weight(request("a", 10, new=None), [view]) == 10 + FIRST_TOKENS
    view.answers = 1000 * (100 - FIRST_ANSWERS), 100 - FIRST_ANSWERS
    mean = (1000 * (100 - FIRST_ANSWERS) + FIRST_ANSWERS * FIRST_TOKENS) / 100
    assert weight(request("a", 10, new=None), [view]) == 10 + round(mean)


def test_a_prefix_draws_a_request_unless_its_replica_has_much_more_to_do() -> None:
    balance, views = Balance("prefix_aware", 2), [View(), View(cached=500)]
    assert balance.choose(request("a", 600), views) == 1
    assert balance.choose(request("b", 600, first=2), views) == 1
    assert balance.choose(request("huge", 8000, first=3, replica=1), views) == 1
    assert balance.choose(request("c", 600, first=4), views) == 0, "1 has thousands of tokens more open"


def test_prompts_that_begin_alike_meet_before_anything_is_cached() -> None:
    balance, views = Balance("prefix_aware", 2), [View(), View()]
    firsts = [balance.choose(request(f"a{i}", 100, first=i), views) for i in range(4)]
    assert firsts == [0, 1, 0, 1]
    assert [balance.choose(request(f"b{i}", 100, first=i), views) for i in (1, 3, 0)] == [1, 1, 0]
    assert balance.choose(request("salted", 100, first=1, namespace="other"), views) == 0
    for i in range(MAX_HEADS + 4):
        balance.choose(request(f"c{i}", 64, new=1, first=i + 10), views)
        balance.close(f"c{i}")
    assert len(balance._heads) == MAX_HEADS


def test_a_request_may_name_its_replica() -> None:
    balance, views = Balance("total_tokens", 3), [View(), View(), View(is_taking=False)]
    assert balance.choose(request("a", replica=2), views) == 2, "its ranks will come back"
    assert balance.replica("a") == 2
    balance.move("a", 0)
    assert balance.replica("a") == 0 and [held.requests for held in balance.held] == [1, 0, 0]


@pytest.mark.parametrize("method", ["total_tokens", "prefix_aware"])
def test_a_skewed_trace_is_spread_evenly(method: BalanceMethod) -> None:
    """Prompts of 10 to 10,000 tokens, of which 200 are open at a time: no replica has much more than the
    mean."""
    random, balance, views = Random(1), Balance(method, 4), [View() for _ in range(4)]
    worst = 0.0
    for i in range(2000):
        length = int(10 ** random.uniform(1, 4))
        balance.choose(request(str(i), length, first=i), views)
        if i >= 200:
            balance.close(str(random.choice(sorted(balance._open, key=int))))
            tokens = [held.tokens for held in balance.held]
            worst = max(worst, max(tokens) / (sum(tokens) / 4))
    assert worst < (1.25 if method == "total_tokens" else 1.5)
