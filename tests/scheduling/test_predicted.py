"""Drafts from an answer that the client predicts."""

from runtime.cache.sequence import Sequence
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.scheduling.speculation.predicted import MOST, WINDOW, PredictedDrafter
from tests.scheduling.answers import VOCAB
from tests.scheduling.guessing import Eager
from tests.scheduling.world import World

PROMPT = [1, 2, 3]
PREDICTION = [10 * i + j for i in range(1, 6) for j in range(6)]


def opened(prediction: list[int] = PREDICTION, max_drafts: int = 64) -> tuple[PredictedDrafter, Sequence]:
    request = Request(
        id="r", prompt_ids=PROMPT, params=SamplingParams(), seed=1, arrival_s=0, prediction=prediction
    )
    drafter, sequence = PredictedDrafter(max_drafts, Eager()), Sequence(7, request, 0, 1000, frozenset())
    drafter.add(sequence)
    drafter.begin(1)
    return drafter, sequence


def proposed(drafter: PredictedDrafter, sequence: Sequence, most: int = 5, in_flight: int = 0) -> list[int]:
    draft = drafter.propose(sequence, len(sequence.tokens) - 1 + in_flight, most)
    return [] if draft is None else draft.tokens


def test_the_answer_begins_as_predicted() -> None:
    drafter, sequence = opened()
    assert proposed(drafter, sequence) == PREDICTION[:5]
    assert proposed(drafter, sequence, in_flight=2) == PREDICTION[2:7]
    sequence.tokens.extend(PREDICTION[:3])
    assert proposed(drafter, sequence, most=2) == PREDICTION[3:5]
    sequence.tokens.extend(PREDICTION[3:])
    assert proposed(drafter, sequence) == [], "it is at its end"


def test_an_answer_that_left_it_comes_back() -> None:
    """Behind an edit, which may be an insertion, a deletion or both, once WINDOW tokens are the same."""
    drafter, sequence = opened()
    sequence.tokens.extend([*PREDICTION[:4], 99, 98])
    assert proposed(drafter, sequence) == []
    for count in range(1, WINDOW):
        sequence.tokens.append(PREDICTION[11 + count])
        assert proposed(drafter, sequence) == [], f"{count} tokens are too few"
    sequence.tokens.append(PREDICTION[11 + WINDOW])
    assert proposed(drafter, sequence) == PREDICTION[12 + WINDOW :][:5]
    sequence.tokens.extend(PREDICTION[:WINDOW])
    assert proposed(drafter, sequence) == PREDICTION[WINDOW:][:5], "it may go back as well"


def test_windows_are_found_at_whole_tokens() -> None:
    """The bytes of a token may look like parts of two others."""
    wanted = [1 << 8, 1 << 8, 1 << 8, 1 << 8]
    drafter, sequence = opened([1 << 16, *[1 << 16] * 5, 0, *wanted, 5, 6])
    sequence.tokens.extend(wanted)
    assert proposed(drafter, sequence) == [5, 6]


def test_a_step_has_no_more_than_its_share() -> None:
    drafter, sequence = opened(list(range(100)), max_drafts=20)
    assert len(proposed(drafter, sequence, most=100)) == MOST
    assert len(proposed(drafter, sequence, most=100)) == 19 - MOST
    assert proposed(drafter, sequence) == []
    drafter.begin(64)
    assert len(proposed(drafter, sequence, most=100)) == MOST


def test_an_ended_sequence_is_forgotten() -> None:
    drafter, sequence = opened()
    assert drafter
    drafter.ended(sequence)
    assert not drafter and proposed(drafter, sequence) == []


def test_a_schedule_with_predictions_gives_the_same_tokens() -> None:
    """Without a drafter: steps are fewer, and planning is as before once the sequence has ended."""
    plain = World(num_pages=200)
    plain.add([3, 1, 4], max_new_tokens=60, ignore_eos=True)
    plain.run()
    answer = plain.seen[0]
    world = World(num_pages=200)
    world.scheduler.planner.drafts.predicted.pace = Eager()
    wrong = [*answer[:20], VOCAB, VOCAB, *answer[20:]]
    world.add([3, 1, 4], max_new_tokens=60, ignore_eos=True, prediction=wrong)
    world.run()
    assert world.seen[0] == answer
    assert world.scheduler.totals.steps < plain.scheduler.totals.steps / 2
    assert not world.scheduler.planner.drafts.predicted
