"""The detokenizer actor: steps in, deltas out; every sequence ends once."""

from collections.abc import Iterator
from typing import Any

import pytest

from runtime.actors.channels import Channel
from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.open_requests import OpenRequests
from runtime.errors import InternalFault, InvalidRequest, Overloaded, RequestError, Unavailable
from runtime.messages.requests import Delta, Finish, FinishReason, Request, Sink, TokenLogprob
from runtime.messages.sampling import SamplingParams
from runtime.messages.scheduler import (
    Abort,
    Ended,
    Opened,
    Refused,
    StepTokens,
    Stopped,
    ToDetokenizer,
    ToScheduler,
)
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary
from tests.actors.sink import ListSink
from tests.text import build

pytestmark = pytest.mark.anyio

VOCABULARY = Vocabulary(build.byte_level(), TokenizerFiles())
END = VOCABULARY.token_id("<|im_end|>") or 0
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def ids_of(text: str) -> list[int]:
    return VOCABULARY.encode(text, add_special=False)


class Bench:
    """A detokenizer with its surroundings; sequence ids are given out from 10."""

    def __init__(self) -> None:
        self.open_requests = OpenRequests()
        self.sent: list[ToScheduler] = []
        self.inbox = Channel[ToDetokenizer](8)
        self.actor = DetokenizerActor(VOCABULARY, self.open_requests, self.inbox, self.sent.append)
        self.next_id = 10

    def open(self, id: str = "a", sink: Sink | None = None, **params: Any) -> Any:
        sink = sink or ListSink()
        self.open_requests.open(id, sink)
        request = Request(id=id, prompt_ids=[1, 2, 3], params=SamplingParams(**params), seed=0, arrival_s=0.0)
        ids = list(range(self.next_id, self.next_id + request.params.n))
        self.next_id += len(ids)
        self.actor.handle(Opened(request, ids))
        return sink

    def step(
        self,
        tokens: dict[int, int],
        *ended: Ended,
        logprobs: dict[int, list[TokenLogprob]] | None = None,
        prompt_logprobs: dict[int, list[TokenLogprob]] | None = None,
        cached: dict[int, int] | None = None,
        more: dict[int, list[int]] | None = None,
    ) -> None:
        self.actor.handle(
            StepTokens(
                list(tokens),
                list(tokens.values()),
                list(ended),
                logprobs or {},
                prompt_logprobs or {},
                cached or {},
                more=more or {},
            )
        )

    def say(self, text: str, sequence_id: int = 10) -> None:
        for token in ids_of(text):
            self.step({sequence_id: token})


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.inbox.discard()


def test_tokens_become_text_until_the_model_ends(bench: Bench) -> None:
    sink = bench.open()
    bench.say("Hello world")
    bench.step({10: END}, Ended(10, STOP, None, 2))
    assert sink.text() == "Hello world" and sink.token_ids() == [*ids_of("Hello world"), END]
    count = len(ids_of("Hello world")) + 1
    assert sink.finishes == {0: Finish(STOP, None, 3, count, 2)}
    assert [delta.prompt_tokens for delta in sink.deltas] == [3] + [0] * (count - 1)
    assert len(bench.open_requests) == 0 and bench.actor.num_open == 0 and bench.sent == []


@pytest.mark.parametrize(("params", "text"), [({}, "Hello"), ({"include_stop": True}, "Hello world")])
def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(
    bench: Bench, params: dict[str, Any], text: str
) -> None:
    sink = bench.open(**params)
    bench.say("Hello")
    [*more, last] = ids_of(" world")
    for token in more:
        bench.step({10: token})
    bench.step({10: last}, Ended(10, STOP, last, 0))
    if more:
        text += VOCABULARY.decode(more) if not params else ""
    assert sink.text() == text and sink.token_ids()[-1] == last and sink.finishes[0].matched == last


def test_special_tokens_are_shown_on_request(bench: Bench) -> None:
    sink = bench.open(skip_special_tokens=False, include_stop=True)
    bench.step({10: END}, Ended(10, STOP, None, 0))
    assert sink.text() == "<|im_end|>"


def test_half_a_character_at_the_end_becomes_a_replacement(bench: Bench) -> None:
    sink = bench.open()
    first, second, *_ = ids_of("🦜")
    bench.step({10: first})
    bench.step({10: second}, Ended(10, LENGTH, None, 0))
    assert [delta.text for delta in sink.deltas] == ["", "\ufffd"]
    assert sink.finishes[0].reason is LENGTH


def test_a_stop_string_ends_the_sequence_here(bench: Bench) -> None:
    sink = bench.open(stop=("wor",))
    for i, token in enumerate(ids_of("Hello world, hello")):
        bench.step({10: token}, cached={10: 1} if i == 0 else {})
    assert sink.text() == "Hello " and bench.sent == [Stopped([10])]
    [finish] = sink.finishes.values()
    assert (finish.reason, finish.matched, finish.cached_tokens, finish.prompt_tokens) == (STOP, "wor", 1, 3)
    assert finish.completion_tokens == len(sink.token_ids()) < len(ids_of("Hello world, hello"))
    assert [delta.cached_tokens for delta in sink.deltas] == [1] + [0] * (len(sink.deltas) - 1)
    assert len(bench.open_requests) == 0 and bench.actor.num_open == 0


def test_the_stop_string_is_kept_on_request(bench: Bench) -> None:
    sink = bench.open(stop=("wor",), include_stop=True)
    bench.say("Hello world")
    assert sink.text() == "Hello wor"


def test_a_stop_string_completed_by_the_last_token_wins_over_the_length(bench: Bench) -> None:
    sink = bench.open(stop=("d",))
    [*some, last] = ids_of("Hello world")
    for token in some:
        bench.step({10: token})
    bench.step({10: last}, Ended(10, LENGTH, None, 5))
    assert (
        sink.text() == "Hello worl"
        and sink.finishes[0].matched == "d"
        and sink.finishes[0].cached_tokens == 5
    )
    assert bench.sent == []  # the scheduler has ended it already


def test_held_text_leaves_at_the_end(bench: Bench) -> None:
    sink = bench.open(stop=("Hello world",))
    bench.say("Hello")
    assert sink.text() == ""
    bench.step({10: END}, Ended(10, STOP, None, 0))
    assert sink.text() == "Hello" and sink.finishes[0].matched is None


def test_stop_strings_count_after_the_minimum_of_tokens(bench: Bench) -> None:
    tokens = ids_of("a b a b a b")
    sink = bench.open(stop=("b",), min_new_tokens=len(tokens) - 2)
    bench.say("a b a b a b")
    assert sink.text() == "a b a b a " and sink.finishes[0].completion_tokens > len(tokens) - 2


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    "params", [{}, {"stop": ("lo wor",)}, {"stop": ("o",), "min_new_tokens": 6}, {"logprobs": True}], ids=str
)
def test_a_run_of_tokens_says_what_they_say_one_by_one(
    bench: Bench, params: dict[str, Any], size: int
) -> None:
    """A stop string ends the answer in the middle of a run as well."""
    tokens = [*ids_of("Hello world and all the others 🦜"), END]
    sinks = [bench.open("one", **params), bench.open("runs", **params)]
    logprobs = [TokenLogprob(token, -float(token), []) for token in tokens] if "logprobs" in params else None
    for at, token in enumerate(tokens):
        bench.step(
            {10: token},
            *([Ended(10, STOP, None, 0)] if token == END else []),
            logprobs=logprobs and {10: [logprobs[at]]},
        )
    for at in range(0, len(tokens), size):
        run = tokens[at : at + size]
        bench.step(
            {11: run[0]},
            *([Ended(11, STOP, None, 0)] if END in run else []),
            more={11: run[1:]} if run[1:] else {},
            logprobs=logprobs and {11: logprobs[at : at + size]},
        )
    outputs = [
        (
            sink.text(),
            [token for delta in sink.deltas for token in delta.token_ids],
            sink.finishes,
            [logprob for delta in sink.deltas for logprob in delta.logprobs or []],
        )
        for sink in sinks
    ]
    assert outputs[0] == outputs[1] and len(outputs[0][2]) == 1


@pytest.mark.parametrize("stop", [(), ("Hello world", "🦜🦜")])
def test_no_logprob_is_lost_when_text_is_held(bench: Bench, stop: tuple[str, ...]) -> None:
    sink = bench.open(stop=stop, logprobs=True, prompt_logprobs=0)
    tokens = ids_of("Hello 🦜")
    prompt = [TokenLogprob(1, None, []), TokenLogprob(2, -1.0, [])]
    for i, token in enumerate(tokens):
        bench.step(
            {10: token},
            *([Ended(10, LENGTH, None, 0)] if i == len(tokens) - 1 else []),
            logprobs={10: [TokenLogprob(token, -float(i), [])]},
            prompt_logprobs={10: prompt} if i == 0 else {},
        )
    assert sink.text() == "Hello 🦜"
    got = [logprob for delta in sink.deltas for logprob in delta.logprobs or []]
    assert [(logprob.token_id, logprob.logprob) for logprob in got] == [
        (token, -float(i)) for i, token in enumerate(tokens)
    ]
    assert [delta.prompt_logprobs for delta in sink.deltas] == [prompt] + [None] * (len(tokens) - 1)


def test_a_request_ends_with_the_last_of_its_sequences(bench: Bench) -> None:
    sink = bench.open(n=3, stop=("!",))
    a, b, mark = ids_of("a")[0], ids_of("b")[0], ids_of("!")[0]
    bench.step({10: a, 11: b, 12: mark})
    assert sink.finishes.keys() == {2} and bench.sent == [Stopped([12])]
    bench.step({10: b, 11: a, 12: a}, Ended(11, LENGTH, None, 0))  # 12 was in flight when it stopped
    assert "a" in bench.open_requests and sink.finishes.keys() == {1, 2}
    bench.step({}, Ended(10, ABORT, None, 4))
    assert "a" not in bench.open_requests and bench.actor.num_open == 0
    assert [sink.text(i) for i in range(3)] == ["ab", "ba", ""]
    assert sink.finishes[0] == Finish(ABORT, None, 3, 2, 4)


def test_an_end_without_any_token(bench: Bench) -> None:
    sink = bench.open()
    bench.step({}, Ended(10, ABORT, None, 0))
    assert sink.deltas == [
        Delta(0, "", [], finish=Finish(ABORT, None, 3, 0, 0), prompt_tokens=3, prompt_ids=[1, 2, 3])
    ]


def test_nothing_is_sent_after_an_abort(bench: Bench) -> None:
    sink = bench.open(n=2)
    bench.step({10: 5, 11: 6})
    bench.open_requests.close("a")
    assert bench.actor.num_open == 0
    bench.step(
        {10: 5, 11: 6}, Ended(10, LENGTH, None, 0), Ended(11, LENGTH, None, 0), Ended(99, STOP, None, 0)
    )
    assert len(sink.deltas) == 2 and sink.finishes == {} and bench.sent == []


def test_opened_after_an_abort_is_ignored(bench: Bench) -> None:
    request = Request(id="gone", prompt_ids=[1], params=SamplingParams(), seed=0, arrival_s=0.0)
    bench.actor.handle(Opened(request, [10]))
    bench.step({10: 5}, Ended(10, LENGTH, None, 0))
    assert bench.actor.num_open == 0 and bench.sent == []


@pytest.mark.parametrize(
    ("status", "kind"), [(400, InvalidRequest), (429, Overloaded), (503, Unavailable), (500, InternalFault)]
)
def test_refusals(bench: Bench, status: int, kind: type[RequestError]) -> None:
    sink = ListSink()
    bench.open_requests.open("a", sink)
    bench.actor.handle(Refused("a", status, "no", "prompt"))
    bench.actor.handle(Refused("a", status, "no", "prompt"))
    bench.actor.handle(Refused("unknown", status, "no"))
    [error] = sink.errors
    assert (
        type(error) is kind
        and (error.message, error.param) == ("no", "prompt")
        and len(bench.open_requests) == 0
    )


class BrokenSink(ListSink):
    def push(self, delta: Delta) -> None:
        raise OSError("the connection's own trouble")


@pytest.mark.parametrize("ended", [[], [Ended(10, LENGTH, None, 0)]])
def test_a_sink_that_raises_harms_no_other(bench: Bench, ended: list[Ended]) -> None:
    broken = bench.open("broken", BrokenSink())
    good = bench.open("good")
    bench.step({10: 5, 11: ids_of("a")[0]}, *ended)
    bench.say("b", sequence_id=11)
    assert good.text() == "ab" and "broken" not in bench.open_requests and bench.actor.num_open == 1
    assert [type(error) for error in broken.errors] == [InternalFault], (
        "its client gets an error, also when the last delta is lost"
    )
    assert bench.sent == ([] if ended else [Abort("broken")])


def test_a_sink_may_abort_and_ask_again_while_it_is_called(bench: Bench) -> None:
    class Restless(ListSink):
        def push(self, delta: Delta) -> None:
            super().push(delta)
            if delta.finish is None:
                bench.open_requests.close("a")
            else:
                bench.open_requests.open("b", later)

    later = ListSink()
    first = bench.open("a", Restless(), n=2)
    bench.step({10: 5, 11: 6})
    assert len(first.deltas) == 1 and len(bench.open_requests) == 0
    second = bench.open("b", Restless())
    bench.step({12: END}, Ended(12, STOP, None, 0))
    assert second.finishes.keys() == {0} and bench.open_requests.find("b") is later


async def test_messages_are_taken_from_the_inbox_in_order(bench: Bench) -> None:
    sink = ListSink()
    bench.open_requests.open("a", sink)
    request = Request(id="a", prompt_ids=[1], params=SamplingParams(), seed=0, arrival_s=0.0)
    tokens = ids_of("Hello")
    bench.inbox.send_nowait(Opened(request, [10]))
    for token in tokens[:-1]:
        bench.inbox.send_nowait(StepTokens([10], [token], [], {}, {}))
    bench.inbox.send_nowait(StepTokens([10], tokens[-1:], [Ended(10, LENGTH, None, 0)], {}, {}))
    bench.inbox.close()
    await bench.actor.run()
    bench.inbox.discard()
    assert sink.text() == "Hello"
