"""The tokenizer actor: GenerateRequest in, Arrive or a failed sink out."""

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from runtime.actors.channels import Channel
from runtime.actors.open_requests import OpenRequests
from runtime.actors.tokenizer import INLINE_CHARS, TokenizerActor, num_chars
from runtime.errors import InternalFault, InvalidRequest
from runtime.messages.constraint import Grammar, Regex
from runtime.messages.requests import Chat, GenerateRequest, GrammarConstraint, Infill, Prompt, Text, Tokens
from runtime.messages.sampling import Free, Limits, SamplingParams
from runtime.messages.scheduler import Arrive, ToScheduler
from runtime.messages.tenants import Tenant
from runtime.text.chat_template import ChatTemplates
from runtime.text.tokenizer_files import TokenizerFiles
from runtime.text.vocabulary import Vocabulary
from tests.actors.sink import ListSink
from tests.text import build

pytestmark = pytest.mark.anyio

LLAMA = Vocabulary(build.sentencepiece(), TokenizerFiles())
TEMPLATES = ChatTemplates({"default": "{% for m in messages %}<s>{{ m.content }}{% endfor %}"}, {})
LIMITS = Limits(vocab_size=LLAMA.size, context_len=50_000, pool_tokens=50_000)
LONG = "hello " * INLINE_CHARS


class Bench:
    """An actor with its surroundings."""

    def __init__(self, vocabulary: Vocabulary = LLAMA, infill_format: str | None = None) -> None:
        self.open_requests = OpenRequests()
        self.inbox = Channel[GenerateRequest](100)
        self.arrived: list[ToScheduler] = []
        self.sinks: dict[str, ListSink] = {}
        self.actor = TokenizerActor(
            vocabulary,
            TEMPLATES,
            self.open_requests,
            self.inbox,
            self.arrived.append,
            limits=LIMITS,
            seed=lambda: 42,
            infill_format=infill_format,
        )

    def ask(self, id: str, prompt: Prompt, **params: Any) -> None:
        self.sinks[id] = ListSink()
        self.open_requests.open(id, self.sinks[id])
        self.inbox.send_nowait(
            GenerateRequest(id=id, prompt=prompt, params=SamplingParams(**params), arrival_s=1.5)
        )

    @property
    def ids(self) -> list[str]:
        return [message.request.id for message in self.arrived if isinstance(message, Arrive)]

    async def finish(self) -> None:
        """Runs the actor until all that was asked is done."""
        self.inbox.close()
        await self.actor.run()
        self.inbox.discard()


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.actor.run)
        yield
        bench.inbox.close()
    bench.inbox.discard()


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        (Text("hello"), [1, *LLAMA.encode("hello", False)]),
        (Text("hello", add_special=False), LLAMA.encode("hello", False)),
        (Tokens([5, 6]), [5, 6]),
        (Chat([{"role": "user", "content": "hello"}]), LLAMA.encode("<s>hello", False)),
    ],
)
async def test_every_form_of_prompt(prompt: Prompt, ids: list[int]) -> None:
    bench = Bench()
    bench.ask("a", prompt, max_new_tokens=3)
    await bench.finish()
    [message] = bench.arrived
    assert isinstance(message, Arrive)
    request = message.request
    assert (request.id, request.prompt_ids, request.seed, request.arrival_s) == ("a", ids, 42, 1.5)
    assert request.params == SamplingParams(max_new_tokens=3) and "a" in bench.open_requests


async def test_the_text_between_two_others() -> None:
    bench = Bench(infill_format="<s>{suffix} world{prefix}")
    bench.ask("a", Infill("hello", " a"))
    await bench.finish()
    [message] = bench.arrived
    assert isinstance(message, Arrive) and message.request.prompt_ids == LLAMA.encode("<s> a worldhello")


@pytest.mark.parametrize("seed", [0, -1, 7])
async def test_a_given_seed_is_kept(seed: int) -> None:
    bench = Bench()
    bench.ask("a", Tokens([5]), seed=seed)
    await bench.finish()
    assert [message.request.seed for message in bench.arrived if isinstance(message, Arrive)] == [seed]


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        (Text("", add_special=False), {}, "prompt"),
        (Tokens([LLAMA.size]), {}, "input_ids"),
        (Tokens([5] * 50_000), {}, "prompt"),
        (Tokens([5]), {"top_logprobs": 1000}, "top_logprobs"),
        (Text("half a pair \ud83d"), {}, "prompt"),
        (Infill("no format", "is known"), {}, "suffix"),
        (Chat([{"role": "user"}], template_args={"tools": 1}), {}, "chat_template_kwargs"),
    ],
)
async def test_refusals_reach_the_sink_once(prompt: Prompt, params: dict[str, Any], param: str) -> None:
    bench = Bench()
    bench.ask("bad", prompt, **params)
    bench.ask("good", Tokens([5]))
    await bench.finish()
    [error] = bench.sinks["bad"].errors
    assert isinstance(error, InvalidRequest) and error.param == param
    assert bench.ids == ["good"] and "bad" not in bench.open_requests


async def test_a_text_that_is_far_too_long_is_refused_by_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Vocabulary.encode
    monkeypatch.setattr(
        Vocabulary, "encode", lambda self, text, *rest: encoded.append(len(text)) or encode(self, text, *rest)
    )
    bench = Bench()
    bench.ask("far", Text("a b " * 1_000_000))
    bench.ask("long", Text("a b " * 12_000))
    await bench.finish()
    assert [error.param for error in bench.sinks["far"].errors] == ["prompt"]
    assert max(encoded) == 8 * LIMITS.longest
    assert bench.ids == ["long"]


async def test_short_prompts_keep_their_order() -> None:
    bench = Bench()
    for i in range(20):
        bench.ask(str(i), Text("hello" * (i % 3)))
    await bench.finish()
    assert bench.ids == [str(i) for i in range(20)]


class SlowVocabulary:
    """Encodes long texts only when it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.thread: int | None = None

    def encode(self, text: str, add_special: bool = True) -> Sequence[int]:
        if len(text) > INLINE_CHARS:
            self.thread = threading.get_ident()
            self.gate.wait()
        return [5]


async def test_a_long_prompt_does_not_hold_up_the_short_ones() -> None:
    slow = SlowVocabulary()
    bench = Bench(slow)  # type: ignore[arg-type]
    async with running(bench):
        bench.ask("long", Text(LONG))
        bench.ask("short", Text("hello"))
        with anyio.fail_after(30):
            while bench.ids != ["short"]:
                await checkpoint()
        slow.gate.set()
    assert bench.ids == ["short", "long"] and slow.thread != threading.get_ident()


async def test_aborted_while_waiting_or_in_a_thread() -> None:
    slow = SlowVocabulary()
    bench = Bench(slow)  # type: ignore[arg-type]
    async with running(bench):
        bench.ask("long", Text(LONG))
        bench.ask("short", Text("hello"))
        bench.open_requests.close("short")
        await wait_all_tasks_blocked()
        bench.open_requests.close("long")
        slow.gate.set()
    assert bench.arrived == [] and not any(sink.errors for sink in bench.sinks.values())


async def test_a_bug_is_pinned_on_its_request() -> None:
    class Broken:
        def encode(self, text: str, add_special: bool = True) -> list[int]:
            raise KeyError(text)

    bench = Bench(Broken())  # type: ignore[arg-type]
    bench.ask("a", Text("secret text"))
    bench.ask("b", Tokens([5]))
    await bench.finish()
    [error] = bench.sinks["a"].errors
    assert isinstance(error, InternalFault) and "secret" not in error.message
    assert bench.ids == ["b"]


@pytest.mark.parametrize(
    ("prompt", "is_long"),
    [
        (Text("x" * 100), False),
        (Text("x" * 101), True),
        (Tokens([1] * 101), True),
        (Chat([{"role": "user", "content": "x" * 90}]), False),
        (Chat([{"role": "user", "content": [{"type": "text", "text": "x" * 101}]}]), True),
        (Chat([{"role": "user", "content": "x"}] * 101), True),
        (Chat([], tools=[{"function": {"description": "x" * 101}}]), True),
    ],
)
async def test_length_of_a_prompt(prompt: Prompt, is_long: bool) -> None:
    assert (num_chars(prompt, 100) > 100) is is_long


@pytest.mark.parametrize("prompt", [Text("hello " * 40_000), Text("hello " * 20), Tokens([5] * 30)])
async def test_prompts_are_cut_where_that_is_asked_for(prompt: Prompt) -> None:
    """The far too long, of which only the head is looked at, and the slightly too long."""
    bench = Bench()
    limits = Limits(vocab_size=LLAMA.size, context_len=10, pool_tokens=50, cuts=True)
    actor = TokenizerActor(
        LLAMA, TEMPLATES, bench.open_requests, bench.inbox, bench.arrived.append, limits=limits
    )
    request = actor.prepare(GenerateRequest(id="a", prompt=prompt, params=SamplingParams(), arrival_s=0), 1)
    whole = prompt.ids if isinstance(prompt, Tokens) else LLAMA.encode("hello " * 20, True)
    assert request.prompt_ids == whole[:9]
    bench.inbox.discard()


async def test_who_asks_is_handed_on() -> None:
    bench = Bench()
    fields = {"priority": -3, "routing_key": "r", "queue_timeout_s": 2.0, "timeout_s": 3.0}
    request = bench.actor.prepare(
        GenerateRequest(
            id="a", prompt=Tokens([5]), params=SamplingParams(), arrival_s=0, tenant=Tenant("t"), **fields
        ),
        1,
    )
    assert {name: getattr(request, name) for name in fields} == fields
    assert (request.namespace, request.tenant) == ("", "t")
    bench.inbox.discard()


async def test_salts_and_isolated_tenants_make_namespaces() -> None:
    bench = Bench()
    isolating = TokenizerActor(
        LLAMA,
        TEMPLATES,
        bench.open_requests,
        bench.inbox,
        bench.arrived.append,
        limits=LIMITS,
        isolates_tenants=True,
    )
    requests = [
        GenerateRequest(
            id="a",
            prompt=Tokens([5]),
            params=SamplingParams(),
            arrival_s=0,
            tenant=Tenant(tenant),
            cache_salt=salt,
        )
        for tenant in ("t", "u")
        for salt in ("", "s")
    ]
    assert len({bench.actor.prepare(one, 1).namespace for one in requests}) == 2, (
        "tenants share what has the same salt"
    )
    assert len({isolating.prepare(one, 1).namespace for one in requests}) == 4
    versions = [
        TokenizerActor(
            LLAMA,
            TEMPLATES,
            bench.open_requests,
            bench.inbox,
            bench.arrived.append,
            limits=LIMITS,
            weight_version=partial(str, version),
        )
        for version in ("", "default", "v2")
    ]
    assert [
        len({version.prepare(requests[0], 1).namespace, bench.actor.prepare(requests[0], 1).namespace})
        for version in versions
    ] == [1, 1, 2]
    bench.inbox.discard()


async def test_a_rule_is_checked_while_others_go_on() -> None:
    """Its request comes with what the ranks must know; an abort, the clock and a refusal end the wait."""
    bench, gate = Bench(), anyio.Event()

    async def check(grammar: Grammar) -> None:
        await gate.wait()
        if grammar.text == "bad":
            raise InvalidRequest("constraint: bad", param="constraint")

    actor = TokenizerActor(
        LLAMA,
        TEMPLATES,
        bench.open_requests,
        bench.inbox,
        bench.arrived.append,
        limits=LIMITS,
        check_grammar=check,
        eos_ids=(2,),
    )
    bench.actor = actor
    async with running(bench):
        for name, text in (("good", "a"), ("gone", "b"), ("wrong", "bad")):
            bench.ask(name, Tokens([5]), constraint=Regex(text), stop_token_ids=(7,))
        bench.sinks["late"] = ListSink()
        bench.open_requests.open("late", bench.sinks["late"])
        params = SamplingParams(constraint=Regex("a"))
        bench.inbox.send_nowait(
            GenerateRequest(id="late", prompt=Tokens([5]), params=params, arrival_s=1.5, timeout_s=1.0)
        )
        bench.ask("plain", Tokens([6]))
        await wait_all_tasks_blocked()
        assert bench.ids == ["plain"]
        bench.open_requests.close("gone")
        gate.set()
    assert bench.ids == ["plain", "good"]
    assert bench.arrived[1].request.grammar_constraint == GrammarConstraint(Grammar("regex", "a"), (), (2, 7))
    assert [error.param for error in bench.sinks["wrong"].errors] == ["constraint"]
    assert [error.status for error in bench.sinks["late"].errors] == [503]


FAST = (Free("</fast>", "<fast>"), Free("</slow>", "<slow>"))


@pytest.mark.parametrize(
    ("prompt", "free", "ends"),
    [
        ("a<fast>", FAST, ["</fast>"]),
        ("a<slow>\n", FAST, ["</slow>"]),
        ("a", FAST, []),
        ("a<fast></fast>", FAST, []),
        ("a", (*FAST, Free("</fast>"), Free("</slow>")), ["</fast>", "</slow>"]),
        ("a<slow>", (*FAST, Free("</fast>"), Free("</slow>")), ["</slow>"]),
        ("a</slow> ", (*FAST, Free("</fast>")), []),
        ("a", "</slow>", ["</slow>"]),
        ("a", "", []),
    ],
)
async def test_a_rule_holds_behind_the_marks_that_end_what_the_prompt_begins(
    prompt: str, free: Any, ends: list[str]
) -> None:
    bench = Bench()

    async def check(grammar: Grammar) -> None:
        pass

    bench.actor = TokenizerActor(
        LLAMA,
        TEMPLATES,
        bench.open_requests,
        bench.inbox,
        bench.arrived.append,
        limits=LIMITS,
        check_grammar=check,
    )
    async with running(bench):
        bench.ask("a", Text(prompt), constraint=Regex("a"), constraint_after=free)
    after = bench.arrived[0].request.grammar_constraint.after_ids
    assert after == tuple([tuple(LLAMA.encode(end, add_special=False)) for end in ends])


async def test_without_grammars_a_rule_is_refused() -> None:
    bench = Bench()
    async with running(bench):
        bench.ask("a", Tokens([5]), constraint=Regex("a"))
    assert ["--grammar-backend none" in error.message for error in bench.sinks["a"].errors] == [True]
