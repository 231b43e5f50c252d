"""The corpus of hostile requests and fuzzed ones against a real server, next to good requests that must be
answered exactly. `python -m bench.hostile` is the long version."""

import asyncio
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.hostile.attack import Complaint, attack, misanswered
from tests.hostile.case import Case
from tests.hostile.corpus import CORPUS
from tests.hostile.fuzz import complaint, fuzzed
from tests.hostile.neighbours import Neighbours
from tests.hostile.target import MODEL, NULL, OPTIONS, Target, target

FUZZED = 1500
SPARE_DESCRIPTORS = 16  # those of a standby rank and the compile process, which come later
WAIT_S = 60.0


@pytest.fixture(scope="module")
def null(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("null"), *NULL, *OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("model"), *MODEL, *OPTIONS) as server:
        yield server


async def with_neighbours(
    server: Target, cases: Sequence[Case], is_wrong: Complaint = misanswered
) -> tuple[list[str], Neighbours]:
    """Attacks a server while good requests go on."""
    neighbours, stop = Neighbours(server.port, has_model=server.has_model), asyncio.Event()
    await neighbours.learn()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(neighbours.run(stop))
        wrong = await attack(server.port, cases, is_wrong)
        stop.set()
    return wrong, neighbours


def nothing_is_left(server: Target, num_descriptors: int) -> None:
    """No request, page or descriptor stays behind, and nothing went wrong on the way."""
    deadline = time.monotonic() + WAIT_S
    while (metrics := server.metrics())["running_sequences"] + metrics[
        "waiting_requests"
    ] > 0 or server.descriptors() > num_descriptors + SPARE_DESCRIPTORS:
        assert time.monotonic() < deadline, (metrics, server.descriptors(), num_descriptors)
        time.sleep(0.05)
    assert metrics["cache_leaks_total"] == metrics["rank_restarts_total"] == 0
    assert not server.bugs()


def run(server: Target, cases: Sequence[Case], is_wrong: Complaint = misanswered) -> None:
    """Attacks a server and sees that only the attackers are refused."""
    num_descriptors = server.descriptors()
    wrong, neighbours = asyncio.run(with_neighbours(server, cases, is_wrong))
    assert not wrong, "\n".join(wrong)
    assert not neighbours.wrong and neighbours.num_right >= 2 * len(neighbours.cases)
    nothing_is_left(server, num_descriptors)


def test_the_corpus_has_names_of_its_own() -> None:
    assert len({case.name for case in CORPUS}) == len(CORPUS)


def test_each_hostile_request_gets_its_answer_and_no_other_does(null: Target) -> None:
    run(null, [case for case in CORPUS if not case.needs_model])


def test_grammars_without_end_end(model: Target) -> None:
    run(model, [case for case in CORPUS if case.needs_model])


def test_fuzzed_requests_are_answered_and_good_ones_exactly(null: Target) -> None:
    run(null, [fuzzed(seed) for seed in range(FUZZED)], complaint)


def test_the_same_seed_is_the_same_request() -> None:
    assert [fuzzed(seed).request() for seed in range(50)] == [fuzzed(seed).request() for seed in range(50)]
