"""Sessions: what stands before a request, by itself and on a running null device."""

from typing import Any

import pytest

from runtime.admin.sessions import MAX_SESSIONS, MAX_TURNS, Sessions
from runtime.errors import InvalidRequest, NotFound, Overloaded
from runtime.messages.requests import Delta, GenerateRequest, SessionParams, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.messages.tenants import DEFAULT_TENANT, Tenant
from tests.actors.sink import ListSink
from tests.test_core import running, until


class Talk:
    """A session, and requests in it whose answers are given here."""

    def __init__(self, **how: Any) -> None:
        self.now_s = 0.0
        self.aborted: list[str] = []
        self.sessions = Sessions(self.aborted.append, lambda: self.now_s)
        self.tenant = how.pop("tenant", DEFAULT_TENANT)
        self.id = self.sessions.open(how.pop("capacity", 100), "s", tenant=self.tenant, **how)

    def begin(self, name: str, new: list[int], *, tenant: str | None = None, **params: Any) -> Any:
        """-> the sink; the prompt is tokenised."""
        request = GenerateRequest(
            id=name,
            prompt=Tokens(new),
            params=SamplingParams(n=params.pop("n", 1)),
            arrival_s=0,
            tenant=self.tenant if tenant is None else Tenant(tenant, sees_all=False),
        )
        request, sink = self.sessions.begin(
            request, SessionParams(id=params.pop("id", self.id), **params), ListSink()
        )
        assert request.before is not None
        request.before.prompt_ids = request.before.token_ids + new
        self.prompt = request.before.prompt_ids
        return sink

    def ask(self, name: str, new: list[int], answer: list[int], **params: Any) -> list[int]:
        """A whole request. -> its prompt"""
        sink = self.begin(name, new, **params)
        for token in answer[:-1]:
            sink.push(Delta(0, "", [token]))
        self.sessions.ended(name)
        sink.push(Delta(0, "", answer[-1:]))
        return self.prompt


def test_turns_go_on_and_branch() -> None:
    talk = Talk()
    assert talk.ask("a", [1, 2], [3, 4]) == [1, 2]
    assert talk.ask("b", [5], [6], rid="a") == [1, 2, 3, 4, 5]
    assert talk.ask("c", [7], [8], rid="b") == [1, 2, 3, 4, 5, 6, 7]
    assert talk.ask("d", [9], [9], rid="a") == [1, 2, 3, 4, 9]  # another branch
    assert talk.ask("e", [9], [9], rid="a", offset=3) == [1, 2, 3, 9]
    assert talk.ask("f", [9], [9], rid="a", offset=-1) == [1, 2, 3, 9]
    assert talk.ask("g", [9], [9], rid="a", drop_previous_output=True) == [1, 2, 9]
    assert talk.ask("h", [1], [2]) == [1]  # a new beginning
    assert talk.ask("i", [9], [9], rid="c") == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_replace_forgets_what_went_on_from_there() -> None:
    talk = Talk()
    talk.ask("a", [1], [2])
    talk.ask("b", [3], [4], rid="a")
    talk.ask("c", [5], [6], rid="b")
    talk.begin("d", [7], rid="b")
    assert talk.ask("e", [8], [9], rid="a", replace=True) == [1, 2, 8] and talk.aborted == ["d"]
    for gone in ("b", "c", "d"):
        with pytest.raises(InvalidRequest, match="no request of this id"):
            talk.ask("x", [1], [1], rid=gone)
    assert talk.ask("f", [1], [2], replace=True) == [1]
    with pytest.raises(InvalidRequest, match="no request of this id"):
        talk.ask("x", [1], [1], rid="a")


def test_one_that_runs_is_replaced_or_waited_for() -> None:
    talk = Talk()
    sink = talk.begin("a", [1])
    sink.push(Delta(0, "", [2]))
    with pytest.raises(InvalidRequest, match="has not ended"):
        talk.begin("b", [3], rid="a")
    assert talk.ask("c", [3], [4], rid="a", replace=True) == [1, 2, 3] and talk.aborted == ["a"]


def test_what_failed_is_not_there() -> None:
    talk = Talk()
    sink = talk.begin("a", [1])
    talk.sessions.ended("a")
    sink.fail(InvalidRequest("too long"))
    with pytest.raises(InvalidRequest, match="no request of this id"):
        talk.begin("b", [1], rid="a")
    assert talk.ask("a", [1], [1]) == [1]  # its id is free


def test_a_line_goes_on_from_the_last() -> None:
    talk = Talk(is_line=True)
    assert [talk.ask(str(i), [i], [i]) for i in range(3)] == [[0], [0, 0, 1], [0, 0, 1, 1, 2]]
    with pytest.raises(InvalidRequest, match="streaming session"):
        talk.ask("x", [1], [1], offset=2)


def test_refusals() -> None:
    talk = Talk(capacity=4, tenant=Tenant("mine", sees_all=False))
    talk.ask("a", [1, 2], [3, 4])
    for error, match, more in [
        (InvalidRequest, "full", {"rid": "a"}),
        (InvalidRequest, "n must be 1", {"n": 2}),
        (NotFound, "no session other", {"id": "other"}),
        (NotFound, "no session s", {"tenant": "yours"}),
    ]:
        with pytest.raises(error, match=match):
            talk.ask("x", [5], [5], **more)
    with pytest.raises(InvalidRequest, match="already"):
        talk.ask("a", [1], [1])
    with pytest.raises(InvalidRequest, match="is open"):
        talk.sessions.open(10, "s", tenant=talk.tenant)
    with pytest.raises(NotFound):
        talk.sessions.close("s", Tenant("yours", sees_all=False))
    talk.sessions.close("s", talk.tenant)
    for act in (lambda: talk.sessions.close("s", talk.tenant), lambda: talk.ask("y", [1], [1])):
        with pytest.raises(NotFound):
            act()


def test_bounds() -> None:
    talk = Talk(idle_s=10)
    for i in range(MAX_TURNS + 5):
        talk.ask(str(i), [i], [i])
    with pytest.raises(InvalidRequest, match="no request of this id"):
        talk.ask("x", [1], [1], rid="4")
    assert talk.ask("x", [1], [1], rid="5") == [5, 5, 1]
    for _ in range(MAX_SESSIONS - 1):
        talk.sessions.open(10, idle_s=5)
    with pytest.raises(Overloaded):
        talk.sessions.open(10)
    talk.now_s = 6
    talk.begin("runs", [1])
    talk.sessions.open(10, "late")
    assert len(talk.sessions) == 2, "only the idle ones are gone"
    kept = talk.sessions.num_tokens.total()
    assert kept == MAX_TURNS - 2 + 3  # prompts; what was forgotten and what still runs does not count
    talk.now_s = 100
    talk.sessions.open(10, "later")
    assert len(talk.sessions) == 3, "a session with a running request is not idle; `late` has an hour"


def test_tokens_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.admin.sessions.MAX_TOKENS", 9)
    talk = Talk()
    talk.ask("a", [1] * 9, [2, 3])
    with pytest.raises(Overloaded, match="close some"):
        talk.ask("b", [1], [2])
    talk.sessions.close("s")
    assert not talk.sessions.num_tokens


@pytest.mark.anyio
async def test_a_conversation_computes_only_what_is_new() -> None:
    async with running(page_size=1, null_step_s=0.001) as core:
        session = core.control.open_session(1000)
        prompt, before = list(range(1, 20)), 0
        rid: str | None = None
        for turn in range(3):
            sink = ListSink()
            name = f"turn-{turn}"
            core.submit(
                GenerateRequest(
                    id=name,
                    prompt=Tokens(prompt),
                    params=SamplingParams(max_new_tokens=8),
                    arrival_s=0,
                    session=SessionParams(id=session, rid=rid),
                ),
                sink,
            )
            await until(lambda sink=sink: sink.finishes)
            finish = sink.finishes[0]
            assert finish.prompt_tokens == before + len(prompt)
            assert finish.cached_tokens >= before - 1  # the last token of an answer is never computed
            before, rid, prompt = finish.prompt_tokens + 8, name, [30 + turn]
        core.control.close_session(session)
        with pytest.raises(NotFound):
            core.submit(
                GenerateRequest(
                    id="late",
                    prompt=Tokens([1]),
                    params=SamplingParams(),
                    arrival_s=0,
                    session=SessionParams(id=session),
                ),
                sink,
            )
