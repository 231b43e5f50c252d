"""Memory that decoded files of all requests may take: who wants more waits in order, or gets 503."""

from base64 import b64encode

import anyio
import numpy as np
import pytest
from anyio.to_thread import run_sync

from runtime.errors import Unavailable
from runtime.media.budget import ByteBudget
from runtime.media.settings import DecodeLimits
from tests.media.files import image, pixels
from tests.media.loading import ended, loading, named

pytestmark = pytest.mark.anyio
MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_who_waits_is_served_in_order_when_arrays_are_gone() -> None:
    budget = ByteBudget(100)
    arrays = [np.zeros(40, np.uint8), np.zeros(50, np.uint8)]
    for array in arrays:
        budget.hold(array)
    order: list[int] = []

    async def wait(size: int) -> None:
        await budget.take(size)
        order.append(size)

    async with anyio.create_task_group() as tasks:
        for size in (60, 5, 30):
            tasks.start_soon(wait, size)
            await anyio.wait_all_tasks_blocked()
        assert order == [], "5 more would fit, and stand behind 60"
        arrays.pop(0)
        await anyio.wait_all_tasks_blocked()
        assert order == []
        del array
        await run_sync(arrays.clear)  # ends in another thread
        await anyio.wait_all_tasks_blocked()
        assert order == [60, 5, 30] and budget.used == 95
        budget.give_back(60)
    assert budget.used == 35


async def test_who_gives_up_takes_nothing() -> None:
    budget = ByteBudget(100)
    await budget.take(1000)  # as good as all
    assert budget.used == 100
    async with ended() as tasks:
        tasks.start_soon(budget.take, 80)
        await anyio.wait_all_tasks_blocked()
    with anyio.move_on_after(0.001) as limit:
        await budget.take(10)
    assert limit.cancelled_caught
    budget.give_back(1000)
    assert budget.used == 0
    await budget.take(100)


async def test_files_wait_for_memory_of_other_requests() -> None:
    """Room for one image of 4 MiB while a decoder may take 6 MiB, within 10 MiB."""
    one = named(base64=b64encode(image("PNG", pixels(1024, 1400))).decode())
    limits = DecodeLimits(max_value_bytes=6 * MIB)
    async with loading(max_host_bytes=10 * MIB, decode=limits) as loader:
        first = await loader.load([one])
        prepared = np.zeros(MIB, np.uint8)
        loader.hold(prepared)
        taken: list[int] = []

        async def load() -> None:
            (media,) = await loader.load([one])
            taken.append(media.values.nbytes)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await anyio.sleep(0.1)
            assert not taken
            del first
            with anyio.fail_after(20):
                while not taken:
                    await anyio.sleep(0.01)
        assert taken == [1024 * 1400 * 3] and loader._memory.used == MIB


async def test_a_file_without_memory_is_a_503_that_says_so() -> None:
    async with loading(max_host_bytes=10 * MIB, timeout_s=0.2) as loader:
        kept = np.zeros(9 * MIB, np.uint8)
        loader.hold(kept)
        with pytest.raises(Unavailable, match="host memory that --mm-host-memory-gb allows") as caught:
            await loader.load([named(base64=b64encode(image("PNG")).decode())])
        assert caught.value.param == named().param and caught.value.status == 503
        del kept
        assert loader._memory.used == 0
