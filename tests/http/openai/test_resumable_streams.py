"""Answers in the background that are streams: followed, left, and taken up again."""

from typing import Any

import anyio
import openai
import pytest

from runtime.http.openai.responses.resumable_streams import EVENT_BYTES, ResumableStreams
from tests.http.fake import FakeService
from tests.http.openai.test_responses import ASK, client_of

pytestmark = pytest.mark.anyio


async def read(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_a_stream_in_the_background_goes_on_without_its_client() -> None:
    service = FakeService(hold=True)
    async with client_of(service) as client:
        stream = await client.responses.create(**ASK, background=True, stream=True)
        first = [await anext(stream), await anext(stream)]
        assert [event.type for event in first] == ["response.created", "response.queued"]
        response_id = first[0].response.id
        service.step()
        first += [await anext(stream) for _ in range(4)]
        await stream.close()
        assert not service.aborted and service.running
        behind = await client.responses.retrieve(response_id, stream=True, starting_after=1)
        second = [await anext(behind) for _ in range(4)]
        assert second == first[2:]
        service.run()
        second += await read(behind)
        again = await read(await client.responses.retrieve(response_id, stream=True))
        assert again == first[:2] + second
        assert [event.sequence_number for event in again] == list(range(len(again)))
        assert (
            await read(
                await client.responses.retrieve(
                    response_id, stream=True, starting_after=again[-1].sequence_number
                )
            )
            == []
        )
        stored = await client.responses.retrieve(response_id)
    assert again[2].type == "response.in_progress" and again[-1].response == stored
    assert (
        "".join(event.delta for event in again if event.type == "response.output_text.delta")
        == stored.output_text
        != ""
    )
    assert stored.usage.output_tokens == 12 and service.aborted == []


async def test_failures_and_cancellations_end_the_events() -> None:
    for fail_after in (0, 2):
        async with client_of(FakeService(fail_after=fail_after)) as client:
            events = await read(await client.responses.create(**ASK, background=True, stream=True))
            assert events[-1].type == "response.failed" and events[-1].response.error.message
            assert (await client.responses.retrieve(events[0].response.id)).status == "failed"
    service = FakeService(hold=True)
    async with client_of(service) as client:
        stream = await client.responses.create(**ASK, background=True, stream=True)
        response_id = (await anext(stream)).response.id
        while not service.running:
            await anyio.lowlevel.checkpoint()
        assert (await client.responses.cancel(response_id)).status == "cancelled"
        await read(stream)
        assert len(service.aborted) == 1
        await client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id, stream=True)


async def test_events_that_are_not_kept_are_a_400() -> None:
    async with client_of() as client:
        for fields in ({}, {"background": True}):
            response = await client.responses.create(**ASK, **fields)
            with pytest.raises(openai.BadRequestError, match="not stored"):
                await client.responses.retrieve(response.id, stream=True)
        events = await read(await client.responses.create(**ASK, background=True, stream=True))
        for wrong in ("-1", "x"):
            with pytest.raises(openai.BadRequestError, match="starting_after"):
                await client.responses.retrieve(
                    events[0].response.id, stream=True, extra_query={"starting_after": wrong}
                )


@pytest.mark.parametrize("has_report", [False, True])
async def test_usage_reports_what_was_cached(has_report: bool) -> None:
    async with client_of(FakeService(has_cache_report=has_report, storage="file")) as client:
        whole = await client.responses.create(**ASK)
        final = (await read(await client.responses.create(**ASK, stream=True)))[-1].response
    details = {"device": 3, "host": 0, "storage": 0, "storage_backend": "file"}
    for response in (whole, final):
        details_of = response.usage.input_tokens_details
        assert details_of.cached_tokens == 3
        assert getattr(details_of, "cached_tokens_details", None) == (details if has_report else None)


async def test_what_is_kept_is_bounded() -> None:
    resumable_streams = ResumableStreams(10 * (EVENT_BYTES + 8))
    event = b"data: x\n\n"  # 7 bytes before its end
    resumable_streams.max_bytes = 10 * (EVENT_BYTES + 7)
    old, older = resumable_streams.open("old"), resumable_streams.open("older")
    for stream in (old, older):
        resumable_streams.append(stream, event * 3)
        stream.finish()
    one, other = resumable_streams.open("one"), resumable_streams.open("other")
    resumable_streams.append(one, event * 6)
    assert resumable_streams.find("old") is None and resumable_streams.find("older") is older
    resumable_streams.append(other, event * 3)
    assert resumable_streams.find("older") is None and (one.first, one.end, other.first) == (0, 6, 0)
    resumable_streams.append(other, event * 2)
    assert (one.first, one.end, other.end) == (
        1,
        6,
        5,
    ) and resumable_streams.size == resumable_streams.max_bytes
    follower = one.follow(2)
    assert await anext(follower) == event * 4
    resumable_streams.append(one, event * 20)
    assert one.end == 26 and one.first > 6
    assert [data async for data in follower] == []  # too slow: what it wants is gone
    for response_id in ("one", "other"):
        resumable_streams.drop(response_id)
    assert resumable_streams.size == 0 and one.is_over
