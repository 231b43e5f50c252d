"""Blocks of a diffusion model: whatever the schedule, preemptions and deaths, sequences get the same tokens;
and which tokens the algorithms keep."""

from random import Random

import pytest

from runtime.cache.block import Block
from runtime.messages.requests import FinishReason
from runtime.scheduling.diffusion.algorithms import Algorithm, Diffusion, JointThreshold, LowConfidence
from runtime.scheduling.handover import hand_over
from tests.scheduling.world import World

MASK = 77
ALGORITHMS: tuple[Algorithm, ...] = (
    LowConfidence(threshold=0.6),
    JointThreshold(threshold=0.7, edit_threshold=0.8, max_post_edit_steps=2),
)


def world(algorithm: Algorithm = ALGORITHMS[0], size: int = 4, **options: object) -> World:
    diffusion = Diffusion(algorithm=algorithm, size=size, mask_id=MASK)
    return World(diffusion=diffusion, **({"depth": 1, "page_size": 4} | options))


def check(made: World) -> None:
    """All answers are what they should be, but those of requests that are taken to kill ranks."""
    for i, seen in made.seen.items():
        assert seen == made.expected(i) or i in made.failed
    assert len(made.failed) <= len(made.seen) // 3
    made.check_pages()


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["low", "joint"])
@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_gives_the_same_tokens(algorithm: Algorithm, seed: int) -> None:
    random = Random(seed)
    made = world(
        algorithm,
        size=random.choice([1, 2, 4]),
        page_size=random.choice([4, 8]),
        num_pages=random.choice([14, 40]),
        depth=random.choice([1, 2]),
        chunk=random.choice([4, 7, 16]),
        max_len=50,
        conservativeness=random.choice([0.0, 1.0]),
    )
    base = [random.randrange(50) for _ in range(20)]
    for _ in range(12):
        prompt = base[: random.randrange(20)] + [random.randrange(50) for _ in range(random.randrange(1, 9))]
        made.add(prompt, max_new_tokens=random.randrange(1, 24), n=random.choice([1, 1, 2]))
        for _ in range(random.randrange(12)):
            if not made.submit() and made.results:
                made.receive()
        made.check_pages()
        if random.random() < 0.15:
            made.die()
    made.run()
    check(made)
    assert all(count == 1 for count in made.ends.values())


def test_sequences_that_give_way_go_on_with_their_blocks() -> None:
    made = world(num_pages=9, max_running=3, conservativeness=0.0)
    for first in range(3):
        made.add([first, 1, 2, 3, 4], max_new_tokens=13, ignore_eos=True)
    made.run()
    check(made)
    assert made.scheduler.totals.preemptions


def test_a_block_that_is_complete_takes_no_step_of_its_own() -> None:
    """Three blocks of 4, a place in each step."""
    made = world(LowConfidence(threshold=1.0), num_pages=40)
    made.add([1, 2, 3, 4], max_new_tokens=12, ignore_eos=True)
    made.run()
    check(made)
    assert made.scheduler.totals.steps == 1 + 12


def test_prompts_in_whole_blocks_are_found_again() -> None:
    made = world(num_pages=40)
    prompt = list(range(10, 23))
    for _ in range(2):
        made.add(prompt, max_new_tokens=5, ignore_eos=True)
        made.run()
    check(made)
    assert made.scheduler.totals.cached_tokens == 12
    assert set(made.reasons.values()) == {FinishReason.LENGTH}


def test_low_confidence_keeps_what_is_likely_and_one_at_least() -> None:
    algorithm, block = LowConfidence(threshold=0.5), Block.begin([9], 4, MASK)
    assert not algorithm.fill(block, MASK, [1, 2, 3, 4], [0.9, 0.2, 0.5, 0.4])
    assert block.tokens == [9, MASK, 3, MASK]
    assert algorithm.fill(block, MASK, [5, 6, 7, 8], [0.9, 0.6, 0.9, 0.7])
    assert block.tokens == [9, 6, 3, 8]


def test_joint_threshold_edits_the_answer_and_not_the_prompt() -> None:
    algorithm = JointThreshold(threshold=0.5, edit_threshold=0.6, max_post_edit_steps=1)
    block = Block.begin([9], 4, MASK)
    assert not algorithm.fill(block, MASK, [1, 2, 3, 4], [0.9, 0.9, 0.9, 0.1])
    assert not algorithm.fill(block, MASK, [1, 5, 6, 4], [0.9, 0.7, 0.6, 0.1])
    assert block.tokens == [9, 5, 3, 4], "6 is not above its threshold"
    assert not algorithm.fill(block, MASK, [1, 5, 8, 4], [0.9] * 4), "one step of edits"
    assert algorithm.fill(block, MASK, [1, 5, 7, 4], [0.9] * 4) and block.tokens == [9, 5, 8, 4]


def test_joint_threshold_ends_when_nothing_changes() -> None:
    algorithm, block = JointThreshold(), Block([1, 2], 0)
    assert algorithm.fill(block, MASK, [1, 2], [0.9, 0.9]) and block.tokens == [1, 2]


def test_answers_to_one_prompt_go_to_another_scheduler_amid_their_first_block() -> None:
    source, target = (world(LowConfidence(threshold=1.0), num_pages=40) for _ in range(2))
    ids = source.add([1, 2, 3, 4, 5], max_new_tokens=6, n=3, ignore_eos=True)
    for _ in range(3):
        source.submit()
        source.receive()
    for i in ids:
        source.scheduler.planner.put_back(source.scheduler.roster.live[i])
    source.scheduler.roster.begin()
    hand_over(source.scheduler, target.scheduler, "r0")
    target.seen, target.requests = source.seen, source.requests
    target.run()
    check(target)
