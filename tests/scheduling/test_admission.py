"""Who gets into a step, and how much of it: the options of admission, against the oracle rank."""

from collections import Counter

import pytest

from runtime.cache.sequence import Sequence
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import StepPlan
from runtime.scheduling.admission import Admission
from runtime.scheduling.chunking import Chunking
from runtime.scheduling.forecast import Forecast
from runtime.scheduling.step_costs import Work
from runtime.scheduling.waiting import AGED_LEVEL, OrderConfig
from tests.scheduling.world import World

PRIORITIES = OrderConfig(has_priorities=True, preemption_threshold=10)


def step(world: World) -> StepPlan:
    plan = world.scheduler.plan()
    assert plan is not None
    world.results.append(world.rank.execute(plan))
    world.receive()
    return plan


def prompt(length: int, first: int = 1) -> list[int]:
    return [first, *((first * 7 + i * 5) % 40 for i in range(length - 1))]


def check(world: World) -> None:
    world.run()
    for i, tokens in world.seen.items():
        assert tokens == world.expected(i)


def test_a_better_priority_takes_a_slot() -> None:
    world = World(num_pages=60, max_running=2, order=PRIORITIES)
    low = [world.add(prompt(6, k), priority=0, max_new_tokens=30, ignore_eos=True)[0] for k in range(2)]
    for _ in range(3):
        step(world)
    (high,) = world.add(prompt(6, 9), priority=10, max_new_tokens=5, ignore_eos=True)
    step(world)
    running = {s.id for s in world.scheduler.roster.decoding}
    assert running == {low[0], high}, "the younger of the low ones gave way, at once"
    check(world)
    assert world.scheduler.totals.priority_preemptions == 1


@pytest.mark.parametrize(
    "order",
    [PRIORITIES, OrderConfig(), OrderConfig(has_priorities=True, low_first=True, preemption_threshold=2**40)],
)
def test_idle_time_is_what_no_other_request_wants(order: OrderConfig) -> None:
    """Whatever the options say about priorities: anybody takes the slots of idle ones, and is never kept
    waiting by them."""
    world = World(num_pages=60, max_running=2, order=order)
    idle = [
        world.add(prompt(6, k), is_idle=True, priority=99, max_new_tokens=20, ignore_eos=True)[0]
        for k in range(3)
    ]
    step(world)
    others = [world.add(prompt(6, 10 + k), max_new_tokens=5, ignore_eos=True)[0] for k in range(3)]
    for _ in range(2):  # one a step makes way
        step(world)
    assert {s.id for s in world.scheduler.roster.decoding} == set(others[:2])
    assert world.scheduler.totals.priority_preemptions == 2
    check(world)
    assert set(world.ends) == {*idle, *others}


def test_idle_ones_have_no_age() -> None:
    world = World(num_pages=60, max_running=1, order=OrderConfig(patience=3))
    (idle,) = world.add(prompt(6), is_idle=True, max_new_tokens=3, ignore_eos=True)
    for k in range(40):
        world.add(prompt(6, k), max_new_tokens=2, ignore_eos=True)
    while len(world.ends) < 40:
        step(world)
        assert idle not in world.ends
    check(world)


@pytest.mark.parametrize(
    ("priority", "order"),
    [
        (9, PRIORITIES),
        (0, PRIORITIES),
        (None, PRIORITIES),
        (-50, PRIORITIES),
        (50, OrderConfig()),
        (50, OrderConfig(has_priorities=True, low_first=True)),
    ],
)
def test_a_priority_that_is_not_better_by_enough_waits(priority: int | None, order: OrderConfig) -> None:
    world = World(num_pages=60, max_running=1, order=order)
    world.add(prompt(6), priority=0, max_new_tokens=30, ignore_eos=True)
    step(world)
    world.add(prompt(6, 9), priority=priority, max_new_tokens=5, ignore_eos=True)
    check(world)
    assert world.scheduler.totals.preemptions == 0


def test_a_better_priority_takes_pages() -> None:
    world = World(num_pages=13, page_size=4, max_running=8, order=PRIORITIES, chunk=64)
    for k in range(4):
        world.add(prompt(8, k), priority=0, max_new_tokens=4, ignore_eos=True)
    step(world)
    (high,) = world.add(prompt(30, 9), priority=100, max_new_tokens=5, ignore_eos=True)
    step(world)
    assert high in {s.id for s in (*world.scheduler.roster.extending, *world.scheduler.roster.decoding)}
    check(world)
    assert world.scheduler.totals.priority_preemptions >= 2


def test_no_request_gives_way_in_vain() -> None:
    """Even with all low ones gone there would be no room beside the one that is not worse by enough."""
    world = World(num_pages=13, page_size=4, max_running=8, order=PRIORITIES, chunk=64)
    world.add(prompt(28, 1), priority=95, max_new_tokens=8, ignore_eos=True)
    world.add(prompt(6, 2), priority=0, max_new_tokens=4, ignore_eos=True)
    step(world)
    world.add(prompt(30, 9), priority=100, max_new_tokens=5, ignore_eos=True)
    step(world)
    assert world.scheduler.totals.priority_preemptions == 0
    check(world)


def test_pages_are_taken_from_the_worst_priority_first() -> None:
    world = World(num_pages=11, page_size=4, max_running=4, order=PRIORITIES, conservativeness=0.0)
    ids = [
        world.add(prompt(5, k), priority=[5, 0, 8][k], max_new_tokens=18, ignore_eos=True)[0]
        for k in range(3)
    ]
    gone: list[int] = []
    while len(world.scheduler.roster.live) == 3:
        step(world)
        gone += [
            i
            for i in ids
            if i in world.scheduler.roster.live and world.scheduler.roster.live[i].slot < 0 and i not in gone
        ]
    assert gone[:1] == [ids[1]]
    check(world)


def test_low_priorities_do_not_starve() -> None:
    """High ones come as fast as they are served; the low one runs after `patience` of them, to its end,
    without giving way."""
    world = World(
        num_pages=60,
        max_running=1,
        order=OrderConfig(has_priorities=True, preemption_threshold=1, patience=10),
    )
    (low,) = world.add(prompt(6), priority=0, max_new_tokens=6, ignore_eos=True)
    (sequence,) = world.scheduler.roster.live.values()
    others = 0
    while not world.ends[low]:
        while len(world.scheduler.roster.live) < 4:
            others += 1
            world.add(prompt(6, others % 30), priority=100, max_new_tokens=2, ignore_eos=True)
        step(world)
    assert sequence.level == AGED_LEVEL and others <= 10 + 4
    check(world)


def test_a_long_prompt_leaves_room_for_others() -> None:
    world = World(
        num_pages=400,
        max_running=8,
        chunk=16,
        max_len=400,
        admission=Admission(max_step_tokens=16, long_share=0.5),
    )
    (long,) = world.add(prompt(300), max_new_tokens=1)
    assert step(world).counts.tolist() == [16], "alone it gets all"
    shorts = [world.add(prompt(8, k), max_new_tokens=2, ignore_eos=True)[0] for k in range(2, 6)]
    plan = step(world)
    assert plan.counts.tolist() == [8, 8] and world.scheduler.totals.held_back == 1
    for _ in range(5):
        step(world)
    assert all(world.ends[i] for i in shorts) and not world.seen[long]
    check(world)


def test_what_the_others_leave_goes_to_the_long_one() -> None:
    world = World(
        num_pages=400,
        max_running=8,
        chunk=16,
        max_len=400,
        admission=Admission(max_step_tokens=16, long_share=0.25),
    )
    world.add(prompt(300), max_new_tokens=1)
    step(world)
    world.add(prompt(2, 5), max_new_tokens=1)
    assert step(world).counts.tolist() == [14, 2]
    check(world)


def test_at_most_so_many_prompts_in_a_step() -> None:
    world = World(
        num_pages=60, max_running=8, chunk=64, admission=Admission(max_step_tokens=64, max_prompts=2)
    )
    for k in range(5):
        world.add(prompt(4, k), max_new_tokens=6, ignore_eos=True)
    sizes = [len(plan.slots) - plan.num_decodes for plan in (step(world) for _ in range(4))]
    assert sizes == [2, 2, 1, 0]
    check(world)


def test_without_chunks_a_prompt_is_one_row() -> None:
    world = World(
        num_pages=60, max_running=8, chunk=200, admission=Admission(max_step_tokens=200, has_chunks=False)
    )
    for k in range(5):
        world.add(prompt(60 + k, k), max_new_tokens=6, ignore_eos=True)
    counts: list[int] = []
    while world.scheduler.roster.waiting:
        plan = step(world)
        counts += plan.counts[plan.num_decodes :].tolist()
    assert counts[:3] == [60, 61, 62] and max(counts) < 65
    check(world)


def test_decode_steps_between_admissions() -> None:
    world = World(num_pages=400, max_running=16, admission=Admission(max_step_tokens=16, decode_steps=4))
    world.add(prompt(4), max_new_tokens=40, ignore_eos=True)
    admitted = []
    for number in range(1, 14):
        if number > 1:
            world.add(prompt(4, number), max_new_tokens=40, ignore_eos=True)
        admitted += [number] if len(step(world).admits) else []
    assert admitted == [1, 5, 9, 13]
    check(world)


def running(id: int, prompt_len: int, generated: int, max_new: int) -> Sequence:
    request = Request(id=str(id), prompt_ids=[1] * prompt_len, params=SamplingParams(), seed=0, arrival_s=0)
    sequence = Sequence(id, request, 0, prompt_len + max_new, frozenset())
    sequence.tokens.extend([2] * generated)
    return sequence


def test_forecast_learns_and_calms_down() -> None:
    forecast = Forecast(1.0)
    for _ in range(200):
        forecast.ended(100, 1000)
    assert [
        forecast.future(running(i, 10, generated, 1000)) for i, generated in enumerate([0, 60, 400, 900])
    ] == [100, 40, 200, 100]
    for _ in range(3):
        forecast.preempted()
    assert forecast.future(running(0, 10, 0, 1000)) == int(100 * 1.5**3)
    assert forecast.future(running(0, 10, 0, 150)) <= 150, "never more than is allowed"
    for _ in range(200):
        forecast.step()
    assert forecast.future(running(0, 10, 0, 1000)) == 100
    assert Forecast(0.0).future(running(0, 10, 0, 1000)) == 0


def test_forecast_expects_what_was_seen() -> None:
    """Half of the answers are short, half long: of those that are past the short ones, all are long."""
    forecast = Forecast(1.0)
    for i in range(200):
        forecast.ended([10, 90][i % 2], 100)
    young = [forecast.future(running(i, 10, 0, 100)) for i in range(100)]
    assert sorted(set(young)) == [10, 90] and 45 <= young.count(10) <= 55
    assert {forecast.future(running(i, 10, 20, 100)) for i in range(100)} == {70}


def test_the_peak_is_where_one_ends() -> None:
    forecast = Forecast(1.0)
    for _ in range(200):
        forecast.ended(100, 100)  # all take all
    # in 10 steps the first ends and gives 100 + 90 + 10 back; until then the other one takes 10, and then 80
    # more
    assert forecast.peak([running(0, 100, 90, 100), running(1, 10, 10, 100)]) == 20
    assert forecast.peak([running(1, 10, 10, 100)]) == 90
    assert forecast.peak([]) == 0


def tokens_a_step(world: World, steps: int) -> float:
    before = world.scheduler.generated_tokens
    for _ in range(steps):
        step(world)
    return (world.scheduler.generated_tokens - before) / steps


@pytest.mark.parametrize(("conservativeness", "is_calm"), [(1.0, True), (0.0, False)])
def test_throughput_recovers_after_preemptions(conservativeness: float, is_calm: bool) -> None:
    """Short answers, then long ones: too many are admitted and some give way; then as many run as if it had
    been known."""
    throughputs = []
    for is_misled in (True, False):
        world = World(num_pages=257, page_size=4, max_running=64, chunk=64, conservativeness=conservativeness)
        for k in range(130 * is_misled):
            world.add(prompt(8, k % 30), max_new_tokens=64, stop_token_ids=tuple(range(50)))
        world.run()
        for k in range(600):
            world.add(prompt(8, k % 30), max_new_tokens=40 + k * 13 % 48, ignore_eos=True)
        tokens_a_step(world, 200)
        early = world.scheduler.totals.preemptions
        assert early > 0
        throughputs.append(tokens_a_step(world, 600))
        assert (world.scheduler.totals.preemptions == early) == is_calm, (
            "hysteresis: no one gives way any more"
        )
    # of about 23 if every page were full at every moment
    assert throughputs[0] > 0.97 * throughputs[1] > 0.97 * 19


@pytest.mark.parametrize("weights", [{}, {"a": 2.0}])
def test_tenants_with_unequal_load_get_equal_shares(weights: dict[str, float]) -> None:
    """One tenant asks ten times as often and for longer answers; while both want something, tokens are shared
    by weight."""
    world = World(
        num_pages=300,
        page_size=4,
        max_running=8,
        chunk=32,
        order=OrderConfig(fair=True, weights=weights, patience=0),
    )
    for k in range(1200):
        world.add(
            prompt(6, k % 30),
            tenant="a" if k % 11 == 0 else "b",
            max_new_tokens=20 if k % 11 else 10,
            ignore_eos=True,
        )
    while sum(s.request.tenant == "a" for s in world.scheduler.roster.live.values()) > 8:
        step(world)
    tokens = world.scheduler.roster.shares.tokens
    assert tokens["a"] / tokens["b"] == pytest.approx(weights.get("a", 1.0), rel=0.1)


def test_tenants_are_charged_what_is_computed() -> None:
    world = World(num_pages=60, page_size=4, chunk=8, order=OrderConfig(fair=True))
    world.add(prompt(40), tenant="a", max_new_tokens=10, ignore_eos=True)
    world.run()
    world.add(prompt(40), tenant="b", max_new_tokens=1, ignore_eos=True)
    world.run()
    tokens = world.scheduler.roster.shares.tokens
    assert 40 + 9 <= tokens["a"] <= 40 + 9 + 2 and 4 <= tokens["b"] <= 4 + 2, "cached tokens cost nothing"


def test_all_waiting_are_admitted_within_a_bound_once_arrivals_stop() -> None:
    world = World(
        num_pages=40,
        max_running=4,
        order=OrderConfig(policy="lpm", has_priorities=True, fair=True, patience=8),
    )
    for k in range(60):
        world.add(
            prompt(5 + k % 7, k % 9),
            priority=k % 5 * 10,
            tenant="xyz"[k % 3],
            max_new_tokens=4,
            ignore_eos=True,
        )
    steps: Counter[int] = Counter()
    while world.scheduler.roster.live:
        for sequence in world.scheduler.roster.live.values():
            steps[sequence.id] += 1
        step(world)
    assert max(steps.values()) <= 60 * (4 + 2)
    check(world)


def test_chunks_of_equal_time() -> None:
    """Times are made by a law of the model's form; chunks deeper in the prompt shrink so that the time
    stays."""
    chunking = Chunking(page_size=16)
    assert chunking.size(100_000, 2048) == 2048, "nothing is known yet"

    def seconds(tokens: int, start: int) -> float:
        return 0.002 + 10e-6 * tokens + 2e-10 * (tokens * start + tokens * tokens / 2)

    for k in range(40):
        tokens, start = 256 * (1 + k % 8), 4096 * (k % 7)
        chunking.learn(Work(0, tokens, tokens * start + tokens * tokens // 2), seconds(tokens, start))
    assert chunking.size(0, 2048) == 2048
    for start in (10_000, 50_000, 100_000):
        size = chunking.size(start, 2048)
        assert size % 16 == 0 and seconds(size, start) == pytest.approx(seconds(2048, 0), rel=0.02)
    assert chunking.size(10_000_000, 2048) == 256, "never less than an eighth"
