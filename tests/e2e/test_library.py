"""The library face: in other people's processes, loops and apps."""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

import runtime
from runtime.errors import InvalidRequest, ModelError, OptionsError, StartError, Unavailable
from runtime.messages.requests import SessionParams

Checkpoint = Callable[[str], Path]
SMALL: dict[str, Any] = {
    "num_threads": 1,
    "context_length": 256,
    "max_total_tokens": 2048,
    "dtype": "float32",
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.mark.anyio
async def test_stream_equals_generate(checkpoint: Checkpoint) -> None:
    async with runtime.Engine(str(checkpoint("qwen2")), **SMALL) as engine:
        whole = await engine.generate("Hello", **GREEDY)
        deltas = [delta async for delta in engine.stream("Hello", **GREEDY)]
        assert "".join(d.text for d in deltas) == whole.text and len(whole.token_ids) == 6
        chat = await engine.generate([{"role": "user", "content": "Hello"}], **GREEDY)
        assert chat.finish is not None and chat.finish.prompt_tokens > 6
        several = await engine.generate_n([1, 2, 3], n=3, max_new_tokens=2, ignore_eos=True)
        assert [len(answer.token_ids) for answer in several] == [2, 2, 2]
        with pytest.raises(InvalidRequest, match="generate_n"):
            await engine.generate([1, 2, 3], n=3)
        for wrong in ("x", 0, 10**12):
            with pytest.raises(InvalidRequest, match="^n: expected int"):
                await engine.generate_n([1, 2, 3], n=wrong)


@pytest.mark.anyio
async def test_an_engine_answers_between_its_opening_and_its_end_alone(checkpoint: Checkpoint) -> None:
    engine = runtime.Engine(model_path=str(checkpoint("qwen2")), **SMALL)
    with anyio.fail_after(5):  # and does not wait for an opening that may never come
        for call in (engine.generate("Hello"), engine.flush_cache(), engine.embed("Hello")):
            with pytest.raises(Unavailable, match="not open; use it within"):
                await call
    async with engine:
        with pytest.raises(Unavailable, match="opened once"):
            await engine.__aenter__()
        assert (await engine.generate("Hello", **GREEDY)).token_ids
    with pytest.raises(Unavailable, match="opened once"):
        async with engine:
            pass


@pytest.mark.anyio
async def test_leaving_a_stream_aborts_it(checkpoint: Checkpoint) -> None:
    async with runtime.Engine(model_path=str(checkpoint("qwen2")), **SMALL) as engine:
        stream = engine.stream("Hello", max_new_tokens=200, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        await engine.generate("x", **GREEDY)  # the abort is through when this is
        assert engine.load().running == 0


@pytest.mark.anyio
async def test_pause_flush_and_abort(checkpoint: Checkpoint) -> None:
    async with runtime.Engine(model_path=str(checkpoint("qwen2")), **SMALL) as engine:
        whole = await engine.generate("Hello", max_new_tokens=40, ignore_eos=True, seed=5)
        stream = engine.stream("Hello", max_new_tokens=40, ignore_eos=True, seed=5, rid="mine")
        deltas = [await anext(stream)]
        await engine.pause_generation("retract")
        assert await engine.flush_cache() > 0
        await engine.continue_generation()
        deltas += [delta async for delta in stream]
        # computed again without the cache
        assert [i for delta in deltas for i in delta.token_ids] == whole.token_ids
        stream = engine.stream("Hello", max_new_tokens=200, ignore_eos=True, rid="mine")
        await anext(stream)
        assert engine.abort_request("mi") == 1 and engine.abort_request("") == 0
        last = [delta async for delta in stream][-1]
        assert last.finish is not None and last.finish.reason == "abort"
    with pytest.raises(Unavailable, match="this engine is closed"):
        await engine.generate("Hello")


@pytest.mark.anyio
async def test_a_session_goes_on_where_it_was(checkpoint: Checkpoint) -> None:
    async with runtime.Engine(model_path=str(checkpoint("qwen2")), **SMALL) as engine:
        session = engine.open_session(1000)
        first = await engine.generate([1, 2, 3], rid="one", session=SessionParams(id=session), **GREEDY)
        second = await engine.generate(
            [4, 5], rid="two", session=SessionParams(id=session, rid="one"), **GREEDY
        )
        whole = await engine.generate([1, 2, 3, *first.token_ids, 4, 5], **GREEDY)
        assert second.token_ids == whole.token_ids
        engine.close_session(session)


@pytest.mark.anyio
async def test_log_probabilities_of_chosen_tokens(checkpoint: Checkpoint) -> None:
    """In company, and where neighbours want other widths."""
    picks = [7, 3, 90]
    options = SMALL | {"max_logprobs": -1}
    async with runtime.Engine(model_path=str(checkpoint("qwen2")), **options) as engine:
        all_ids = engine._core.model.vocab_size
        everything = await engine.generate(
            [1, 2, 3, 4], logprobs=True, top_logprobs=all_ids, prompt_logprobs=all_ids, **GREEDY
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: engine.generate([5, 6], logprobs=True, top_logprobs=9, **GREEDY))
            chosen = await engine.generate(
                [1, 2, 3, 4], logprobs=True, top_logprobs=2, prompt_logprobs=1, logprob_ids=picks, **GREEDY
            )
        alone = await engine.generate([1, 2, 3, 4], logprobs=True, logprob_ids=picks, **GREEDY)
    assert chosen.token_ids == everything.token_ids and alone.prompt_logprobs is None
    pairs = [
        *zip(chosen.logprobs, everything.logprobs, strict=True),
        *zip(alone.logprobs, everything.logprobs, strict=True),
        *zip((chosen.prompt_logprobs or [])[1:], (everything.prompt_logprobs or [])[1:], strict=True),
    ]
    assert len(pairs) == 6 + 6 + 3
    for one, all_of_them in pairs:
        known = dict(all_of_them.top)
        assert [i for i, _ in one.picked] == picks and [i for i, _ in one.top] == [
            i for i, _ in all_of_them.top[: len(one.top)]
        ]
        for token, logprob in one.picked:
            assert logprob == pytest.approx(known[token], abs=1e-5)


@pytest.mark.anyio
async def test_two_engines_share_a_process_and_touch_nothing(checkpoint: Checkpoint) -> None:
    before = (
        [signal.getsignal(s) for s in signal.valid_signals()],
        logging.root.handlers[:],
        asyncio.get_event_loop_policy(),
    )
    async with (
        runtime.Engine(model_path=str(checkpoint("qwen2")), **SMALL) as one,
        runtime.Engine(model_path=str(checkpoint("llama")), **SMALL) as two,
    ):
        answers = [await one.generate("Hello", **GREEDY), await two.generate("Hello", **GREEDY)]
        assert answers[0].token_ids != answers[1].token_ids
        assert (
            [signal.getsignal(s) for s in signal.valid_signals()],
            logging.root.handlers[:],
            asyncio.get_event_loop_policy(),
        ) == before


@pytest.mark.anyio
async def test_errors_have_names(checkpoint: Checkpoint) -> None:
    with pytest.raises(OptionsError, match="modle_path"):
        runtime.Engine(modle_path="x")
    with pytest.raises(ModelError):
        runtime.Engine(model_path="/nowhere")
    with pytest.raises(ModelError, match="tokenizer.json"):
        async with runtime.Engine(model_path=str(checkpoint("llama")), tokenizer_path="/", **SMALL):
            pass
    async with runtime.Engine(model_path=str(checkpoint("llama")), **SMALL) as engine:
        with pytest.raises(InvalidRequest, match="temperature"):
            await engine.generate("x", temperature=-1)
        with pytest.raises(InvalidRequest, match="prompt"):
            await engine.generate([1] * 500)
        with pytest.raises(
            InvalidRequest, match="max_tokens is not a known field; did you mean max_new_tokens"
        ):
            await engine.generate("x", max_tokens=5)
        assert (await engine.generate("x", **GREEDY, stop="none of it")).token_ids
    with pytest.raises(InvalidRequest, match="temperature"):  # and no group of it
        async with runtime.Engine(model_path=str(checkpoint("llama")), **SMALL) as engine:
            await engine.generate("x", temperature=-1)


@pytest.mark.anyio
async def test_ranks_that_cannot_be_started_again_fail_the_requests_and_not_the_app(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    async with runtime.Engine(model_path=str(folder), **SMALL) as engine:
        stream = engine.stream("x", max_new_tokens=200, ignore_eos=True)
        await anext(stream)
        (folder / "model.safetensors").unlink()
        engine._core.replicas[0].supervisor.ranks._ranks[0].process.kill()
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass
        with pytest.raises(Unavailable):
            await engine.generate("x")
        assert isinstance(engine._core.failure, StartError) and "safetensors" in str(engine._core.failure)


def test_blocking(checkpoint: Checkpoint) -> None:
    with runtime.LLM(model_path=str(checkpoint("qwen3")), **SMALL) as llm:
        one = llm.generate("Hello", **GREEDY)
        many = llm.generate(["Hello", "World"], **GREEDY)
        assert many[0].text == one.text and len(many) == 2
        chats: list[Any] = [[{"role": "user", "content": text}] for text in ("Hello", "World")]
        assert [a.token_ids for a in llm.generate(chats, **GREEDY)] == [
            llm.generate(chat, **GREEDY).token_ids for chat in chats
        ]
        assert len(llm.generate([[1, 2], [3]], **GREEDY)) == 2
        assert len(llm.generate_n("Hello", n=2, max_new_tokens=2)) == 2
        with pytest.raises(InvalidRequest):
            llm.generate(["x"], temperature=-1)
        for nothing in (None, 7, b"Hello"):
            with pytest.raises(InvalidRequest, match="a prompt is"):
                llm.generate(nothing)  # type: ignore[arg-type]
    llm.close()
    with pytest.raises(Unavailable, match="closed"):
        llm.generate("Hello")


@pytest.mark.parametrize(
    ("last", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("{}['x']", 1), ("del llm", 0)]
)
def test_a_program_that_closes_nothing_ends(last: str, code: int) -> None:
    program = (
        "import runtime; llm = runtime.LLM(device='null')\n"
        f"assert llm.generate([5, 6], max_new_tokens=2).token_ids\n{last}"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr


def test_a_forked_process_cannot_use_it_and_harms_nothing(checkpoint: Checkpoint) -> None:
    with runtime.LLM(str(checkpoint("qwen3")), **SMALL) as llm:
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):  # pytest's own handlers must not run here
                with pytest.raises(Unavailable, match="belongs to another process"):
                    llm.generate("Hello", **GREEDY)
                llm.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert llm.generate("Hello", **GREEDY).token_ids


def test_blocking_in_another_thread(checkpoint: Checkpoint) -> None:
    texts: list[str] = []

    def work() -> None:
        with runtime.LLM(model_path=str(checkpoint("qwen3")), **SMALL) as llm:
            texts.append(llm.generate("Hello", **GREEDY).text)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(texts) == 1


@pytest.mark.anyio
async def test_mounted_under_a_prefix(checkpoint: Checkpoint) -> None:
    async with runtime.Engine(model_path=str(checkpoint("qwen3")), **SMALL) as engine:
        app = Starlette(
            routes=[Route("/", lambda _: PlainTextResponse("mine")), Mount("/llm", engine.asgi())]
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
            assert (await client.get("/")).text == "mine"
            assert (await client.get("/llm/health")).json()["state"] == "ready"
            body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
            whole = (await client.post("/llm/v1/completions", json=body)).json()["choices"][0]["text"]
            streamed = (await client.post("/llm/v1/completions", json=body | {"stream": True})).text
            assert whole and streamed.endswith("data: [DONE]\n\n")


@pytest.mark.anyio
async def test_an_app_with_its_own_engine(checkpoint: Checkpoint) -> None:
    llm = runtime.asgi(str(checkpoint("qwen3")), **SMALL)
    app = Starlette(routes=[Mount("/llm", llm)], lifespan=llm.lifespan)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client,
    ):
        assert (await client.get("/llm/health")).json()["state"] == "ready"


@pytest.mark.anyio
async def test_lifespan_events(checkpoint: Checkpoint) -> None:
    app = runtime.asgi(model_path=str(checkpoint("qwen3")), **SMALL)
    to_app, from_app = anyio.create_memory_object_stream[Any](2), anyio.create_memory_object_stream[Any](2)
    with to_app[0], to_app[1], from_app[0], from_app[1]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app, {"type": "lifespan"}, to_app[1].receive, from_app[0].send)
            for event in ("startup", "shutdown"):
                await to_app[0].send({"type": f"lifespan.{event}"})
                assert (await from_app[1].receive())["type"] == f"lifespan.{event}.complete"
