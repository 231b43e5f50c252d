"""What /v1/responses keeps stays within its bounds, however many answers there are."""

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from runtime.http.app import http_app
from runtime.http.openai.stored_objects import StoredObjects
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

MAX_BYTES, STREAM_BYTES = 60_000, 25_000
ROUNDS = 30


async def one_round(client: openai.AsyncOpenAI, number: int) -> None:
    """Conversations that grow, answers whose events are kept, one that is not kept, one that is deleted, and
    one that fails."""
    ask: dict[str, Any] = {
        "model": "org/fake",
        "input": f"{number} " + "x" * (50 * (number % 17)),
        "max_output_tokens": 30,
    }
    first = await client.responses.create(**ask)
    second = await client.responses.create(**ask, previous_response_id=first.id)
    await client.responses.create(**ask, previous_response_id=second.id)
    stream = await client.responses.create(**ask, background=True, stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"
    await client.responses.create(**ask, store=False)
    await client.responses.delete(second.id)
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(**ask, previous_response_id=second.id)


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_memory_does_not_grow(is_on_disk: bool, tmp_path: Path) -> None:
    service = FakeService()
    stored_objects = StoredObjects(service, tmp_path, 2**20) if is_on_disk else StoredObjects(service)
    store, resumable_streams = stored_objects.responses.store, stored_objects.responses.resumable_streams
    store.kept.max_bytes, resumable_streams.max_bytes = MAX_BYTES, STREAM_BYTES
    if store.table is not None:
        store.table.kept.max_bytes = MAX_BYTES

    def size() -> int:
        """Of the database, with what is free in it; or of memory."""
        if store.table is None:
            return store.kept.num_bytes
        db = store.table._db
        if db is None:
            return 0
        (pages,), (page_bytes,) = [
            db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
        ]
        return pages * page_bytes

    seen = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stored_objects.run)
        async with (
            serving(http_app(service, stored_objects=stored_objects)) as (host, port),
            openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0) as client,
        ):
            gc.collect()
            gc.freeze()  # what was there before is not looked at again and again
            tracemalloc.start()
            try:
                for number in range(ROUNDS):
                    await one_round(client, number)
                    service.requests.clear()
                    gc.collect()
                    seen.append((size(), tracemalloc.get_traced_memory()[0]))
            finally:
                tracemalloc.stop()
                gc.unfreeze()
            stored, streamed = (
                size() if store.table is None else store.table.kept.num_bytes,
                resumable_streams.size,
            )
        tasks.cancel_scope.cancel()
    assert MAX_BYTES / 2 < stored <= MAX_BYTES and STREAM_BYTES / 2 < streamed <= STREAM_BYTES, (
        "the bounds were met"
    )
    assert max(bytes for bytes, _ in seen) < 2 * MAX_BYTES
    # The least of ten rounds: what is kept for good is in all of them, a buffer of the moment is not.
    half, end = [min(heap for _, heap in part) for part in (seen[10:20], seen[20:])]
    assert end < half + 100_000, "nothing else is kept of an answer"
