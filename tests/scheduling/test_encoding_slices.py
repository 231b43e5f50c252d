"""Encodings that are made in slices while sequences decode: how long they are, and what becomes of them."""

from collections.abc import Iterator

import numpy as np
import pytest

from runtime.cache.sequence import Sequence
from runtime.messages.media import MediaInput, MediaKind
from runtime.messages.requests import Request
from runtime.messages.sampling import SamplingParams
from runtime.messages.steps import NO_INTS, StepPlan, StepResult
from runtime.scheduling.admission import Admission
from runtime.scheduling.encode_costs import BOUND_SHARE, ENCODE_S, LEAST_PART, EncodeCosts, MadePart, Making
from runtime.scheduling.encodings import EncodingConfig, Encodings
from runtime.scheduling.micro_batches import MicroBatches
from runtime.scheduling.scheduler import Scheduler, SchedulerConfig, encode_for_step
from tests.scheduling.test_encodings import PLACEHOLDER, Rank

BOUND_S = 0.2
ROW_S = 0.01  # of the encoder
DECODE_S = 0.001  # of a step


def image(digest: bytes, rows: int) -> MediaInput:
    return MediaInput(
        kind=MediaKind.IMAGE,
        digest=digest,
        start=1,
        positions=np.arange(rows, dtype=np.int32),
        values=np.zeros((3, 2, 2), np.float32),
    )


def request(name: str, *media: MediaInput, new: int = 1000) -> Request:
    ids = [1, *[PLACEHOLDER for one in media for _ in one.positions], 1]
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return Request(id=name, prompt_ids=ids, params=params, seed=0, arrival_s=0.0, media=media)


def longest_s(whole_s: float) -> float:
    """Seconds that a slice may take of an encoding of `whole_s`: the last one is a little longer."""
    return BOUND_S * BOUND_SHARE + whole_s * LEAST_PART


class Server:
    """A scheduler, and a rank whose encoder takes ROW_S for a row."""

    def __init__(
        self, bound_s: float = BOUND_S, *, is_blind: bool = False, is_cut: bool = True, num_batches: int = 1
    ) -> None:
        """`is_blind`: the encoder's time is not reported."""
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_running=8,
                max_step_tokens=4096,
                max_len=4096,
                page_size=16,
                num_pages=4096,
                eos_ids=(),
                micro_batches=MicroBatches(num_batches),
                encodings=EncodingConfig(max_rows=4096, is_cut=is_cut),
                admission=Admission(max_step_tokens=4096, max_step_s=bound_s),
            )
        )
        self.rank, self.is_blind = Rank(), is_blind
        self.rows: dict[int, int] = {}  # of encodings, by id
        self.encoded_s: list[float] = []  # by step
        self.decoded: list[int] = []  # sequences that decode, by step

    @property
    def slices(self) -> list[float]:
        """Seconds of the encoder in each step that had some."""
        return [seconds for seconds in self.encoded_s if seconds]

    @property
    def encodings(self) -> Encodings:
        assert self.scheduler.planner.encodings is not None
        return self.scheduler.planner.encodings

    def step(self) -> StepPlan | None:
        """One step, from its plan to its result."""
        plan = self.scheduler.plan()
        command, before = encode_for_step(self.scheduler, plan), dict(self.rank.begun)
        spent_s = 0.0
        if command is not None:
            self.rows |= {one.id: one.num_rows for one in command.media}
            until = {one.id: 1.0 for one in command.media} | command.until
            spent_s = sum(ROW_S * self.rows[id] * (part - before.get(id, 0.0)) for id, part in until.items())
        self.rank.obey(command)
        if plan is None:
            return None
        if plan.media is not None:
            assert set(plan.media.ids.tolist()) <= self.rank.kept
        self.encoded_s.append(spent_s)
        self.decoded.append(plan.num_decodes)
        self.finish(plan, spent_s)
        return plan

    def finish(self, plan: StepPlan, spent_s: float) -> None:
        """The result of a step before which the encoder took so long."""
        tokens = np.ones(int((plan.samples > 0).sum()), np.int32)
        logprobs = np.empty(0, np.float32), NO_INTS, np.empty(0, np.float32)
        encode_s = 0.0 if self.is_blind else spent_s
        self.scheduler.apply(StepResult(plan.step, tokens, -1, *logprobs, [], DECODE_S, encode_s=encode_s))

    def sequence(self, name: str) -> Sequence:
        return next(iter(self.scheduler.roster.siblings(name)))

    def steps_until_first(self, name: str) -> int:
        """Steps until a request has its first token."""
        for count in range(1, 500):
            self.step()
            if self.sequence(name).num_generated:
                return count
        raise AssertionError("it stands still")


@pytest.fixture
def server() -> Iterator[Server]:
    """A text decodes, and what a row takes is known."""
    one = Server()
    one.scheduler.add(request("warm", image(b"w", 100), new=1))
    one.step()
    assert one.encoded_s == [pytest.approx(1.0)], "nothing decodes: it is encoded at once"
    one.scheduler.add(request("text"))
    for _ in range(20):
        one.step()
    one.encoded_s.clear()
    one.decoded.clear()
    yield one


def test_streams_wait_for_slices(server: Server) -> None:
    """Four seconds of the encoder: some forty steps of the stream, none of which waits much longer than the
    bound."""
    server.scheduler.add(request("image", image(b"a", 400)))
    count = server.steps_until_first("image")
    assert server.decoded == [1] * count and 39 <= len(server.slices) <= 43
    assert sum(server.encoded_s) == pytest.approx(4.0) and max(server.encoded_s) <= longest_s(4.0)
    assert server.encodings.num_encoded == 2
    assert server.sequence("image").encode_s == pytest.approx(4.0), "all slices are charged to it"


def test_it_runs_through_when_nothing_decodes(server: Server) -> None:
    server.scheduler.add(request("image", image(b"a", 400)))
    for _ in range(3):
        server.step()
    server.scheduler.abort("text")
    assert server.steps_until_first("image") == 1
    assert server.encoded_s[-1] == pytest.approx(4.0 - sum(server.encoded_s[:3])) and server.decoded[-1] == 0


def test_small_images_are_made_at_once(server: Server) -> None:
    """Several as the step has time, and of the next one what is left of it."""
    found = [image(bytes([i]), 4) for i in range(3)]
    for i, one in enumerate(found):
        server.scheduler.add(request(str(i), one))
    server.step()
    assert [server.sequence(str(i)).num_generated for i in range(3)] == [1, 1, 0]
    assert (
        server.encoded_s == [pytest.approx(BOUND_S * BOUND_SHARE, rel=0.05)] and len(server.rank.begun) == 1
    )
    assert server.steps_until_first("2") == 1


def test_one_is_under_way_at_a_time(server: Server) -> None:
    """The second begins when the first is complete; equal ones of two requests are one."""
    for name, digest in (("a", b"a"), ("b", b"b"), ("again", b"a")):
        server.scheduler.add(request(name, image(digest, 100)))
    while not all(server.sequence(name).num_generated for name in ("a", "b", "again")):
        server.step()
        assert len(server.rank.begun) <= 1
    a, b, again = (server.sequence(name).num_generated for name in ("a", "b", "again"))
    assert abs(a - again) <= 3 and b + 5 < min(a, again)
    assert sum(server.encoded_s) == pytest.approx(2.0) and server.encodings.num_encoded == 3


def test_what_an_aborted_request_has_begun_is_freed(server: Server) -> None:
    server.scheduler.add(request("image", image(b"a", 400)))
    for _ in range(3):
        server.step()
    assert len(server.rank.begun) == 1
    server.scheduler.abort("image")
    server.step()
    assert not server.rank.begun and server.encodings.num_rows == 100
    server.scheduler.add(request("again", image(b"a", 400)))
    server.steps_until_first("again")
    assert sum(server.encoded_s) == pytest.approx(4.0 + sum(server.encoded_s[:3])), "it begins anew"


def test_it_is_freed_without_a_step(server: Server) -> None:
    """The last requests end together: no step follows, but the command does."""
    server.scheduler.add(request("image", image(b"a", 400)))
    server.step()
    assert server.rank.begun
    for name in ("image", "text"):
        server.scheduler.abort(name)
    assert server.step() is None and not server.rank.begun
    assert server.step() is None and encode_for_step(server.scheduler, None) is None


def test_one_that_gives_way_begins_anew(server: Server) -> None:
    server.scheduler.add(request("image", image(b"a", 400)))
    server.step()
    server.scheduler.planner.put_back(server.sequence("image"))
    server.step()
    assert len(server.rank.begun) == 1 and server.encodings.num_encoded == 3
    assert server.steps_until_first("image") > 30


def test_new_ranks_begin_anew(server: Server) -> None:
    """The image's request is a suspect although no step had its tokens."""
    server.scheduler.add(request("image", image(b"a", 400)))
    for _ in range(3):
        server.step()
    plan = server.scheduler.plan()
    assert plan is not None and encode_for_step(server.scheduler, plan) is not None
    lost = server.scheduler.lose_ranks()
    assert lost.guilty is None and set(server.scheduler.recovery.marks) == {
        server.sequence(name).id for name in ("text", "image")
    }
    server.scheduler.resume(4096)
    server.rank = Rank()
    server.steps_until_first("image")
    assert server.encodings.num_encoded == 3


def test_what_takes_longer_than_expected_gets_smaller_slices(server: Server) -> None:
    """An image of four times as many rows as any before, sixteen times the work: its own slices say so."""
    server.rows = Squares()
    server.scheduler.add(request("image", image(b"a", 400)))
    server.steps_until_first("image")
    assert sum(server.encoded_s) == pytest.approx(16.0)
    assert max(server.slices) <= 4 * BOUND_S * BOUND_SHARE
    assert max(server.slices[1:-1]) <= 16.0 * LEAST_PART + 1e-9, "one step knows it"


class Squares(dict[int, int]):
    """Rows as if each cost what its square does, of a hundred."""

    def __getitem__(self, id: int) -> int:
        return super().__getitem__(id) ** 2 // 100

    def __ior__(self, others: object) -> "Squares":  # type: ignore[override,misc]
        assert isinstance(others, dict)
        self.update(others)
        return self


@pytest.mark.parametrize("is_blind", [False, True])
def test_what_is_not_known_yet_is_made_in_equal_slices(is_blind: bool) -> None:
    server = Server(is_blind=is_blind)
    server.scheduler.add(request("text"))
    server.step()
    server.encoded_s.clear()
    server.scheduler.add(request("image", image(b"a", 800)))
    server.steps_until_first("image")
    assert server.encoded_s[0] == pytest.approx(8.0 / 16)
    if is_blind:
        assert server.slices[1:] == pytest.approx([2.56, 2.56, 2.38]), "rows are what is known"
    else:
        assert max(server.encoded_s[1:]) <= longest_s(8.0)


def test_without_a_bound_of_steps_encodings_have_their_own() -> None:
    server = Server(bound_s=0.0)
    server.scheduler.add(request("warm", image(b"w", 100), new=1))
    server.step()
    server.scheduler.add(request("text"))
    server.step()
    server.encoded_s.clear()
    server.scheduler.add(request("image", image(b"a", 400)))
    server.steps_until_first("image")
    assert 0.9 * ENCODE_S < max(server.encoded_s) <= ENCODE_S + 4.0 * LEAST_PART


def test_steps_between_those_of_streams_encode_nothing() -> None:
    """In a pipeline the stream's steps take turns with others, which would make it wait for the whole."""
    server = Server(is_blind=True, num_batches=2)
    server.scheduler.add(request("text"))
    server.step()
    plan = server.scheduler.plan()
    assert plan is not None and plan.num_decodes == 1
    server.scheduler.add(request("image", image(b"a", 800)))
    between = server.scheduler.plan()  # it has the token before the image
    assert between is not None and (between.num_decodes, between.counts.tolist()) == (0, [1])
    assert encode_for_step(server.scheduler, between) is None
    for one in (plan, between):
        server.finish(one, 0.0)
    server.steps_until_first("image")
    assert len(server.slices) == 4


def test_encoders_that_do_not_stop_make_one_at_once() -> None:
    server = Server(is_cut=False)
    server.scheduler.add(request("text"))
    server.step()
    server.encoded_s.clear()
    for name in ("a", "b"):
        server.scheduler.add(request(name, image(name.encode(), 100)))
    server.steps_until_first("b")
    assert server.slices == [pytest.approx(1.0)] * 2


def test_costs_grow_with_the_square() -> None:
    costs = EncodeCosts()
    sequence = Sequence(0, request("r"), 0, 100, frozenset())
    for rows in (100, 200, 400, 800) * 3:
        making = Making(MediaKind.IMAGE, rows, planned=1.0)
        for _ in range(4):
            costs.learn([MadePart(sequence, making, 0.25)], (rows * 1e-3 + rows**2 * 1e-5) / 4)
    assert costs.expected_s(Making(MediaKind.IMAGE, 1600)) == pytest.approx(1.6 + 25.6, rel=0.05)
    assert costs.expected_s(Making(MediaKind.AUDIO, 1600)) is None
