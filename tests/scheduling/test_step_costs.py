"""Bounded steps against devices whose costs are known."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from runtime.messages.steps import StepPlan
from runtime.scheduling.admission import Admission
from runtime.scheduling.step_costs import FIRST_TOKENS, LeastSquares, StepCosts, Work
from tests.scheduling.world import World

CHUNK, PAGE = 512, 16
BOUND_S = 0.2


class Clock:
    """Seconds of steps by a law, and what the steps were."""

    def __init__(self, base_s: float, row_s: float, token_s: float, attended_s: float = 0.0) -> None:
        self.law = (base_s, row_s, token_s, attended_s)
        self.noise: Callable[[], float] = lambda: 1.0
        self.lengths: dict[int, int] = {}  # of slots
        self.steps: list[tuple[int, int, float]] = []  # decode rows, prompt tokens and seconds

    def seconds(self, plan: StepPlan) -> float:
        base_s, row_s, token_s, attended_s = self.law
        total, tokens = base_s + row_s * plan.num_decodes, 0
        for admit in plan.admits:
            self.lengths[admit.slot] = admit.length
        for row, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.counts.tolist(), strict=True)):
            start = self.lengths[slot]
            self.lengths[slot] += count
            if row >= plan.num_decodes:
                total += token_s * count + attended_s * (count * start + count * count / 2)
                tokens += count
        total *= self.noise()
        self.steps.append((plan.num_decodes, tokens, total))
        return total

    def mixed(self) -> list[tuple[int, float]]:
        """Prompt tokens and seconds of steps in which sequences decode as well."""
        return [(tokens, seconds) for decodes, tokens, seconds in self.steps if decodes and tokens]


def open_world(clock: Clock, bound_s: float = BOUND_S) -> World:
    world = World(
        num_pages=3000,
        page_size=PAGE,
        max_running=8,
        chunk=CHUNK,
        max_len=40_000,
        admission=Admission(max_step_tokens=CHUNK, max_step_s=bound_s),
    )
    world.rank.seconds = clock.seconds
    return world


def prompt_of(length: int, first: int) -> list[int]:
    return [(first * 31 + i * i) % 97 + 8 for i in range(length)]


def run_streams(world: World, clock: Clock, prompts: list[int], streams: int = 4) -> None:
    """Streams that decode for long, then prompts."""
    for i in range(streams):
        world.add(prompt_of(40, i), max_new_tokens=2000, ignore_eos=True)
    for _ in range(30):
        take_step(world)
    for i, length in enumerate(prompts):
        world.add(prompt_of(length, 50 + i), max_new_tokens=4, ignore_eos=True)
    for _ in range(1500):
        take_step(world)
        if not world.scheduler.roster.extending and not world.scheduler.roster.waiting.has_ready:
            return
    raise AssertionError("prompts stand still")


def take_step(world: World) -> None:
    while world.submit():
        pass
    world.receive()


@pytest.mark.parametrize(
    "law",
    [
        (0.02, 0.001, 0.002),  # 500 tokens/s
        (0.05, 0.0, 0.0004, 1e-8),  # attention counts
        (0.12, 0.01, 0.01),  # slow: a page is most of what the bound leaves
        (0.001, 0.0, 0.00001),  # fast: full chunks fit
    ],
    ids=str,
)
def test_steps_stay_within_the_bound(law: tuple[float, ...]) -> None:
    clock = Clock(*law)
    run_streams(open_world(clock), clock, [3000, 700, 5000])
    mixed = clock.mixed()
    page_s = law[2] * PAGE
    assert max(seconds for _, seconds in mixed) < max(BOUND_S, 1.5 * (law[0] + 5 * law[1])) * 1.1 + page_s
    settled = [tokens for tokens, _ in mixed[8:-3]]
    if law == (0.001, 0.0, 0.00001):
        assert np.median(settled) == CHUNK
    elif law[2] == 0.002:
        assert np.median(settled) > 0.8 * (BOUND_S - 0.024) / 0.002, "the bound is made use of"


def test_the_first_steps_are_careful() -> None:
    """Nothing is known of a prompt's cost when the first meets a stream; then chunks double at most."""
    clock = Clock(0.01, 0.0, 0.0001)
    world = open_world(clock)
    world.scheduler.planner.chunking.costs = StepCosts()  # type: ignore[union-attr]
    world.add(prompt_of(8, 0), max_new_tokens=500, ignore_eos=True)
    for _ in range(10):
        take_step(world)
    world.add(prompt_of(4000, 1), max_new_tokens=2, ignore_eos=True)
    for _ in range(30):
        take_step(world)
    sizes = [tokens for tokens, _ in clock.mixed()]
    assert sizes[0] <= FIRST_TOKENS and max(sizes) == CHUNK
    known = [8, *sizes]
    for i in range(2, len(sizes)):  # a step is planned before the last one's result has come
        assert sizes[i] <= max(FIRST_TOKENS, 2 * max(known[: i + 1]))


def test_prompts_get_on_where_decoding_alone_takes_longer_than_the_bound() -> None:
    clock = Clock(0.5, 0.0, 0.001)
    run_streams(open_world(clock), clock, [2000])
    sizes = [tokens for tokens, _ in clock.mixed()]
    assert np.median(sizes[8:]) >= 200, "half of what decoding takes"
    clock = Clock(0.0001, 0.0, 1.0)
    run_streams(open_world(clock), clock, [200])
    assert all(tokens in (PAGE, 200 % PAGE) for tokens, _ in clock.mixed()[4:]), "a page at least"


def test_no_bound_without_streams() -> None:
    clock = Clock(0.01, 0.0, 0.01)
    world = open_world(clock)
    world.add(prompt_of(3000, 1), max_new_tokens=2, ignore_eos=True)
    world.run()
    assert [tokens for _, tokens, _ in clock.steps][:5] == [CHUNK] * 5


def test_noise_and_outliers() -> None:
    """Times that vary by a fifth, and now and then a step that another program stops for long."""
    clock, draws = Clock(0.02, 0.001, 0.001), random.Random(1)
    clock.noise = lambda: draws.uniform(0.8, 1.2) * (20 if draws.random() < 0.02 else 1)
    run_streams(open_world(clock), clock, [8000, 8000, 8000])
    sizes = [tokens for tokens, _ in clock.mixed()[20:-3]]
    fits = (BOUND_S - 0.025) / 0.001
    assert 0.5 * fits < np.median(sizes) < 1.3 * fits


def test_a_device_that_becomes_slower() -> None:
    clock = Clock(0.02, 0.0, 0.0005)
    world = open_world(clock)
    run_streams(world, clock, [5000])
    clock.law = (0.06, 0.0, 0.0015, 0.0)
    run_streams(world, clock, [15_000], streams=0)
    seconds = [seconds for _, seconds in clock.mixed()]
    assert max(seconds) > BOUND_S * 1.2, "the change is felt"
    assert max(seconds[-20:-3]) < BOUND_S * 1.15


def test_tokens_within_a_time() -> None:
    costs = StepCosts()
    assert costs.tokens_within(0.0, 0, 100) == 100, "nothing is known: nothing costs anything"
    for k in range(60):
        tokens, start = 64 * (1 + k % 8), 1000 * (k % 5)
        attended = tokens * start + tokens * tokens // 2
        costs.learn(Work(0, tokens, attended), 1e-3 * tokens + 1e-8 * attended)
    for start in (0, 5000):
        size = costs.tokens_within(0.25, start, 512)
        assert costs.prompt_s(start, size) <= 0.25 < costs.prompt_s(start, size + 2)
    assert costs.tokens_within(0.25, 20_000, 512) < costs.tokens_within(0.25, 0, 512)
    assert costs.tokens_within(-1.0, 0, 512) == 0


def test_no_coefficient_is_negative() -> None:
    """Features that explain nothing, and data that ask for a negative one."""
    fit = LeastSquares((1.0, 1.0), (1e-9, 1e-9))
    for x in range(20):
        fit.learn((1.0, x), 10.0 - 0.1 * x)
    assert (fit.coefficients >= 0).all()
    assert fit.seconds((1.0, 5)) == pytest.approx(9.0, rel=0.1)
