"""Pixels on their way to ranks: many megabytes, through a ring of four."""

import anyio
import numpy as np
import pytest

from runtime.messages.media import Encode, MediaValues
from tests.actors.test_ranks import decodes, running, start_null

pytestmark = pytest.mark.anyio


async def test_pixels_longer_than_the_ring_arrive_before_their_step() -> None:
    media = [
        MediaValues(id=i, values=np.full(5000, i, np.float32), shape=(5000,), grid=(1, 1, 1), num_rows=1)
        for i in range(2)
    ]
    async with running(start_null(tp_size=2), ring_bytes=1024) as run:
        for step in range(3):
            for command in (Encode(dropped=[step], media=media), decodes(step)):
                with anyio.fail_after(30):
                    while not run.ranks.submit(command):
                        await anyio.sleep(0)
            assert [result.step for result in await run.results(1)] == [step]
    assert [int(one.values[-1]) for one in media] == [0, 1]
