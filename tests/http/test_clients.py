"""The openai client against our own server: both endpoints, streaming and not."""

from typing import Any

import anyio
import openai
import pytest

from runtime.errors import InvalidRequest, Overloaded
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def url(address: tuple[str, int]) -> str:
    return f"http://{address[0]}:{address[1]}/v1"


async def test_chat_streams_what_it_says_whole() -> None:
    async with (
        serving(FakeService()) as address,
        openai.AsyncOpenAI(base_url=url(address), api_key="x", max_retries=0) as client,
    ):
        whole = await client.chat.completions.create(
            model="org/fake", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model="org/fake",
            messages=MESSAGES,
            n=2,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts, finishes, usages, logprobs = ["", ""], {}, [], [[], []]
        async for chunk in stream:
            usages.append(chunk.usage)
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.logprobs:
                    logprobs[choice.index] += choice.logprobs.content
                if choice.finish_reason:
                    assert choice.index not in finishes
                    finishes[choice.index] = choice.finish_reason
        assert texts == [choice.message.content for choice in whole.choices] and all(texts)
        assert logprobs == [choice.logprobs.content for choice in whole.choices]
        assert finishes == {0: "length", 1: "length"}
        # fields that OpenAI's documents call required, though null
        assert {"content", "refusal", "role"} == whole.choices[0].message.model_fields_set
        assert usages[-1] == whole.usage and usages[:-1] == [None] * (len(usages) - 1)
        assert whole.usage.completion_tokens == 40 and whole.usage.prompt_tokens_details.cached_tokens == 3
        assert whole.choices[0].logprobs.content[0].top_logprobs[1].logprob == -1.5


async def test_a_suffix_makes_it_a_gap_to_be_filled() -> None:
    service = FakeService()
    async with (
        serving(service) as address,
        openai.AsyncOpenAI(base_url=url(address), api_key="x", max_retries=0) as client,
    ):
        filled = await client.completions.create(
            model="org/fake", prompt="def f(", suffix="):", echo=True, max_tokens=5
        )
        plain = await client.completions.create(model="org/fake", prompt="def f(...):", max_tokens=5)
    assert filled.choices[0].text == "def f(" + plain.choices[0].text


async def test_completions_stream_what_they_say_whole() -> None:
    async with (
        serving(FakeService()) as address,
        openai.AsyncOpenAI(base_url=url(address), api_key="x", max_retries=0) as client,
    ):
        ask: dict[str, Any] = {
            "model": "org/fake",
            "prompt": ["one", "two"],
            "n": 2,
            "max_tokens": 9,
            "echo": True,
            "logprobs": 1,
        }
        whole = await client.completions.create(**ask)
        stream = await client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        texts, tokens, usage = [""] * 4, [[] for _ in range(4)], None
        async for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                tokens[choice.index] += choice.logprobs.tokens
        assert texts == [choice.text for choice in whole.choices]
        assert [text[:3] for text in texts] == ["one", "one", "two", "two"]
        assert tokens[0] == whole.choices[0].logprobs.tokens and len(tokens[0]) == len("one") + 9
        assert usage == whole.usage and usage.prompt_tokens == 6 and usage.completion_tokens == 36
        assert whole.choices[1].logprobs.token_logprobs[0] is None
        assert whole.choices[0].logprobs.text_offset[:3] == [0, 5, 10]


async def test_errors_arrive_as_the_clients_own() -> None:
    service = FakeService()
    async with (
        serving(service) as address,
        openai.AsyncOpenAI(base_url=url(address), api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
        assert missing.value.code == "model_not_found" and "org/fake" in missing.value.message
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(
                model="org/fake", messages=MESSAGES, n=5_000_000, stream=True
            )
        assert wrong.value.param == "n"
        service.refuse = Overloaded("the queue is full")
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="org/fake", messages=MESSAGES)
        assert [model.id async for model in client.models.list()] == ["org/fake"]
        assert (await client.models.retrieve("org/fake")).id == "org/fake"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_status(is_stream: bool) -> None:
    service = FakeService(fail_after=0)
    async with (
        serving(service) as address,
        openai.AsyncOpenAI(base_url=url(address), api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model="org/fake", messages=MESSAGES, stream=is_stream)
        assert error.value.param == "messages"
        assert service.aborted == []


async def test_a_failure_in_mid_stream_is_an_event() -> None:
    service = FakeService(hold=True, fail_after=3, fail_with=InvalidRequest("it broke"))
    async with (
        serving(service) as address,
        openai.AsyncOpenAI(base_url=url(address), api_key="x", max_retries=0) as client,
    ):
        texts = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_when_asked, service)
            with pytest.raises(openai.APIError, match="it broke"):
                async for chunk in await client.completions.create(model="org/fake", prompt="x", stream=True):
                    texts.append(chunk.choices[0].text)
        assert len("".join(texts)) > 0 and service.aborted == []


async def run_when_asked(service: FakeService) -> None:
    while not service.running:
        await anyio.lowlevel.checkpoint()
    while service.running:
        service.step()
        await anyio.lowlevel.checkpoint()


async def test_the_blocking_client() -> None:
    def talk(base: str) -> str:
        with openai.OpenAI(base_url=base, api_key="x", max_retries=0) as client:
            return "".join(
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(model="default", messages=MESSAGES, stream=True)
            )

    async with serving(FakeService()) as address:
        assert await anyio.to_thread.run_sync(talk, url(address))


@pytest.mark.parametrize("count", [1, 4])
async def test_continuous_usage_counts_up(count: int) -> None:
    async with (
        serving(FakeService()) as address,
        openai.AsyncOpenAI(base_url=url(address), api_key="x", max_retries=0) as client,
    ):
        stream = await client.completions.create(
            model="org/fake",
            prompt="four",
            max_tokens=count,
            stream=True,
            extra_body={"stream_options": {"continuous_usage_stats": True}},
        )
        usages = [chunk.usage async for chunk in stream]
        assert usages[-1].completion_tokens == count
        assert all(
            usage.prompt_tokens == 4 and usage.prompt_tokens_details.cached_tokens == 3 for usage in usages
        )
