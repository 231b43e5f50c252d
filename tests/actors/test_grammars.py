"""The compile process, for real: verdicts, limits, deaths."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

import runtime
from runtime.actors.grammars import Grammars
from runtime.errors import InternalFault, InvalidRequest
from runtime.messages.constraint import Grammar, GrammarSetup

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("forked_children")]

SETUP = GrammarSetup(
    backend="outlines",
    tokenizer_path=str(Path(runtime.__file__).parent / "pocket"),
    vocab_size=2560,
    eos_ids=(2,),
)
GOOD = Grammar("regex", "[a-z]{3}")
ENDLESS = Grammar("regex", "((a|b)*(c|d)*[a-z]{200}){200}")


async def prepared(grammar: Grammar | None) -> None:
    """What ranks do that have compiled it already."""


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    made = Grammars(SETUP, 60.0, prepared)
    yield made
    made.stop()


async def test_good_and_bad(grammars: Grammars) -> None:
    await grammars.check(GOOD)
    with pytest.raises(InvalidRequest, match="constraint: "):
        await grammars.check(Grammar("regex", "(a"))
    with pytest.raises(InvalidRequest, match=r"at \$\.type"):
        await grammars.check(Grammar("json_schema", '{"type": "thing"}'))


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
async def test_what_no_text_can_follow_is_refused(backend: str) -> None:
    grammars = Grammars(msgspec.structs.replace(SETUP, backend=backend), 60.0, prepared)
    try:
        with pytest.raises(InvalidRequest, match="constraint: "):
            await grammars.check(Grammar("json_schema", '{"$ref": "#"}'))
        await grammars.check(Grammar("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}}'))
    finally:
        grammars.stop()


async def test_a_request_goes_on_when_the_ranks_have_compiled_its_grammar() -> None:
    """Before that its first step would wait, and every other sequence with it."""
    compiled, order = anyio.Event(), list[str]()

    async def prepare(grammar: Grammar | None) -> None:
        if grammar is not None:
            order.append("announced")
            await compiled.wait()

    async def ask() -> None:
        await grammars.check(GOOD)
        order.append("goes on")

    grammars = Grammars(SETUP, 60.0, prepare)
    try:
        for round in range(2):  # a known grammar too: the ranks may have forgotten it
            compiled = anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                while len(order) == 2 * round:
                    await anyio.sleep(0.01)
                await anyio.wait_all_tasks_blocked()
                assert order[-1] == "announced"
                compiled.set()
        assert order == ["announced", "goes on"] * 2
    finally:
        grammars.stop()


async def test_many_at_once_and_long_ones(grammars: Grammars) -> None:
    rules = [Grammar("regex", f"[a-z]{{{i}}}" + "x" * 10_000) for i in range(1, 4)] + [GOOD] * 5
    async with anyio.create_task_group() as tasks:
        for rule in rules:
            tasks.start_soon(grammars.check, rule)


async def test_what_takes_too_long_is_killed_and_others_go_on() -> None:
    grammars = Grammars(SETUP, 1.0, prepared)
    try:
        order: list[str] = []

        async def slow() -> None:
            with pytest.raises(InvalidRequest, match="--grammar-timeout|too much memory"):
                await grammars.check(ENDLESS)
            order.append("slow")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow)
            await grammars.check(GOOD)
            order.append("good")
        assert order == ["good", "slow"]
    finally:
        grammars.stop()


async def test_who_leaves_does_not_take_the_others_along(grammars: Grammars) -> None:
    async with anyio.create_task_group() as leaving, anyio.create_task_group() as staying:
        leaving.start_soon(grammars.check, GOOD)
        await anyio.wait_all_tasks_blocked()
        staying.start_soon(grammars.check, GOOD)
        await anyio.wait_all_tasks_blocked()
        leaving.cancel_scope.cancel()
    await grammars.check(GOOD)


async def _kill(grammars: Grammars, after: int) -> int:
    """The process that follows the one with pid `after`. -> its pid"""
    while (process := grammars._process) is None or process.pid == after:
        await anyio.wait_all_tasks_blocked()
    os.kill(process.pid, signal.SIGKILL)
    return process.pid


async def test_a_process_that_is_killed_is_replaced_and_asked_again(grammars: Grammars) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(grammars.check, GOOD)
        await _kill(grammars, 0)
    await grammars.check(GOOD)


async def test_two_that_are_killed_fail_their_check(grammars: Grammars) -> None:
    async with anyio.create_task_group() as tasks:

        async def waiting() -> None:
            with pytest.raises(InternalFault, match="ended"):
                await grammars.check(ENDLESS)

        tasks.start_soon(waiting)
        await _kill(grammars, await _kill(grammars, 0))
    await grammars.check(GOOD)


async def test_a_process_that_hangs_is_replaced_for_all_who_wait(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grammars.check(GOOD)
    assert grammars._process is not None
    hanging = grammars._process.pid
    os.kill(hanging, signal.SIGSTOP)
    monkeypatch.setattr("runtime.actors.grammars.ANSWER_S", -59.5)  # of the limit's 60
    async with anyio.create_task_group() as tasks:
        for letters in (4, 5):
            tasks.start_soon(grammars.check, Grammar("regex", f"[a-z]{{{letters}}}"))
    assert grammars._process is not None and grammars._process.pid != hanging
