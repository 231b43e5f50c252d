"""The first token of an answer travels by itself: its client gets it before the pages of the prompt have
come, and the rest of the answer is what it would have been."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

import runtime
from runtime.messages.transfer import First, Transfer
from runtime.transfer.rooms import Reader, Room
from tests.e2e.conftest import Generate
from tests.e2e.disaggregated import COUNT, FULL, KEY, PROMPT, both, counts, key_options, server, source_of

pytestmark = pytest.mark.anyio

Checkpoint = Callable[[str], Path]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return key_options(tmp_path, KEY)


class Withheld:
    """Pages that a prefill server does not send before `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_over = False
        ready, saving, is_coming = Reader.ready, Reader.saving, Reader.is_coming
        monkeypatch.setattr(Reader, "ready", lambda *asked: ready(*asked) if self.is_over else [])
        monkeypatch.setattr(Reader, "saving", lambda *asked: saving(*asked) if self.is_over else None)
        monkeypatch.setattr(Reader, "is_coming", lambda *asked: is_coming(*asked) if self.is_over else True)

    def release(self, engine: runtime.Engine) -> None:
        self.is_over = True
        assert engine._core._halves is not None
        engine._core._halves.rooms.look()


async def test_it_comes_before_the_pages(
    checkpoint: Checkpoint, reference: Generate, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference("llama", PROMPT, COUNT)
    pages = Withheld(monkeypatch)
    async with server("prefill", checkpoint("llama"), **options) as (engine, prefill):
        async with server("decode", checkpoint("llama"), **options) as (second, decode):
            first, whole = list[Any](), list[Any]()
            source = source_of(engine)

            async def short() -> None:
                first.append(await decode(PROMPT, Transfer(1, source), 1))

            async def long() -> None:
                whole.append(await decode(PROMPT, Transfer(2, source)))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(long)
                tasks.start_soon(short)
                await prefill(PROMPT, Transfer(1))
                await prefill(PROMPT, Transfer(2))
                with anyio.fail_after(10):
                    while not first:
                        await anyio.sleep(0.01)
                assert first == [(expected[:1], FULL)] and not whole and not counts(second).pages
                pages.release(engine)
            assert whole == [(expected, FULL)] and not counts(second).failures
            with anyio.fail_after(10):  # pages of the short one come as well
                while second.load().waiting or second.load().running:
                    await anyio.sleep(0.01)


async def test_nothing_of_a_prompt_of_full_pages_is_computed_again(
    checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]
) -> None:
    """The logits behind its last token are needed on the other server alone."""
    prompt = PROMPT[:FULL]
    expected = reference("llama", prompt, COUNT)
    async with server("prefill", checkpoint("llama"), **options) as prefill:
        async with server("decode", checkpoint("llama"), **options) as (engine, decode):
            assert await both(prefill, decode, prompt) == (expected, FULL)
            assert counts(engine).pages == FULL // 16 and not counts(engine).failures
            assert await both(prefill, decode, prompt, 2) == (expected, FULL - 16), "in the device's cache"


async def test_what_it_may_end(checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]) -> None:
    """A stop token, and the longest that an answer may be; and what it must not be."""
    expected = reference("llama", PROMPT, COUNT)
    async with server("prefill", checkpoint("llama"), **options) as prefill:
        async with server("decode", checkpoint("llama"), **options) as (engine, decode):
            for room, params in enumerate(
                (
                    {"stop_token_ids": [expected[0]], "max_new_tokens": 4},
                    {"stop_token_ids": [expected[0]], "max_new_tokens": 4, "min_new_tokens": 2},
                    {"max_new_tokens": 4, "logit_bias": {str(expected[0]): -1000}},
                )
            ):
                body = {
                    "input_ids": PROMPT,
                    "sampling_params": {"temperature": 0, "ignore_eos": True} | params,
                }
                alone = await decode.post(body | {"return_logprob": True}, None)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(prefill[1].post, body | {"return_logprob": True}, Transfer(room))
                    answer = await decode.post(
                        body | {"return_logprob": True}, Transfer(room, source_of(prefill[0]))
                    )
                assert answer["output_ids"] == alone["output_ids"], params
                logprobs = [one["meta_info"]["output_token_logprobs"] for one in (answer, alone)]
                assert [one[1] for one in logprobs[0]] == [one[1] for one in logprobs[1]]
                assert [one[0] for one in logprobs[0]] == pytest.approx(
                    [one[0] for one in logprobs[1]], abs=1e-4
                )
                assert answer["meta_info"]["finish_reason"] == alone["meta_info"]["finish_reason"]
            assert not counts(engine).failures


async def test_a_server_that_dies_behind_it(
    checkpoint: Checkpoint, reference: Generate, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is computed here, and the answer goes on behind that token."""
    expected = reference("llama", PROMPT, COUNT)
    Withheld(monkeypatch)
    answers = list[Any]()
    async with server("decode", checkpoint("llama"), **options) as (engine, decode):

        async def ask(source: str) -> None:
            answers.append(await decode(PROMPT, Transfer(1, source)))

        async with anyio.create_task_group() as tasks:
            async with server("prefill", checkpoint("llama"), **options) as (first, prefill):
                tasks.start_soon(ask, source_of(first))
                await prefill(PROMPT, Transfer(1))
                assert first._core._halves is not None
                room = first._core._halves.rooms.find(1)
                assert isinstance(room, Room) and room.first == First(expected[0])
                scheduler = engine._core.replicas[0].scheduler
                assert scheduler is not None
                with anyio.fail_after(10):
                    while not scheduler.generated_tokens:
                        await anyio.sleep(0.01)
        assert answers == [(expected, 0)] and counts(engine).failures == 1


async def test_a_second_question_gets_it_as_well(
    checkpoint: Checkpoint, reference: Generate, options: dict[str, Any]
) -> None:
    """Another decode server asks for the token after the first one has died."""
    expected = reference("llama", PROMPT, COUNT)
    async with server("prefill", checkpoint("llama"), **options) as prefill:
        for _ in range(2):
            async with server("decode", checkpoint("llama"), **options) as (engine, decode):
                assert await both(prefill, decode, PROMPT) == (expected, FULL)
                assert not counts(engine).failures
                assert structs.asdict(counts(engine))["pages"] == FULL // 16
