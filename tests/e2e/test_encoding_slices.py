"""Images that are encoded in slices beside a stream of text, against transformers: greedy tokens in
float32."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

import runtime
from runtime.messages.media import Encode
from runtime.scheduling import planner
from tests.e2e.image_engine import COUNT, GREEDY, OPTIONS, Images
from tests.models.make_media import PLACEHOLDER, greedy_qwen_vl, make_qwen_vl, picture

pytestmark = pytest.mark.anyio

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B = picture(1, 40, 60), picture(2, 90, 30)
PROMPT, IMAGES = [*TEXT, PLACEHOLDER, *MORE, PLACEHOLDER], [A, B]
STREAMED = 400  # tokens of the stream beside them
LAYERS = 3  # of the tower

Expected = tuple[list[int], list[int]]  # the answer to the images, and the stream


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("qwen")
    model = make_qwen_vl(folder, "2.5")
    images = greedy_qwen_vl(model, PROMPT, IMAGES, COUNT)[0]
    return folder, (images, greedy_qwen_vl(model, MORE, [], STREAMED)[0])


class Watched(Images):
    """An engine whose commands to encode are counted."""

    def __init__(self, engine: runtime.Engine) -> None:
        super().__init__(engine)
        self.streamed: list[int] = []
        self.slices: list[tuple[int, float, int]] = []  # id, how far, and tokens of the stream before it
        take = self.encodings.take_command

        def taken() -> Encode | None:
            if (command := take()) is not None:
                at = self.scheduler.generated_tokens
                self.slices += [(id, until, at) for id, until in command.until.items()]
            return command

        self.encodings.take_command = taken  # type: ignore[method-assign]

    async def stream(self) -> None:
        """Text that is streamed meanwhile."""
        async for delta in self.engine.stream(MORE, **GREEDY | {"max_new_tokens": STREAMED}):
            self.streamed += delta.token_ids

    async def ask_beside(self) -> list[int]:
        """The answer to both images, which are prepared before the stream goes on."""
        found: list[list[int]] = []

        async def ask() -> None:
            found.append((await self.ask(PROMPT, IMAGES)).token_ids)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await self.continue_with(1)
        return found[0]

    async def begun(self) -> None:
        """Returns when an image is under way."""
        with anyio.fail_after(60):
            while len(self.slices) < LAYERS - 1:
                await anyio.sleep(0.0005)

    @property
    def is_under_way(self) -> bool:
        return self.encodings._under_way is not None


@pytest.fixture
async def watched(
    qwen: tuple[Path, Expected], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Watched]:
    """An engine that streams, with slices as short as there are."""
    monkeypatch.setattr(planner, "BOUND_SHARE", 1e-9)
    options = OPTIONS | {"max_step_ms": 1.0, "context_length": 512} | getattr(request, "param", {})
    async with runtime.Engine(model_path=str(qwen[0]), **options) as engine:
        found = Watched(engine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(found.stream)
            while not found.scheduler.generated_tokens:
                await anyio.sleep(0)
            await engine.pause_generation("in_place")
            assert 0 < found.scheduler.generated_tokens < STREAMED / 2
            yield found


@pytest.mark.parametrize(
    "watched",
    [
        {},
        {"disable_overlap_schedule": True, "chunked_prefill_size": 7},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True},
        {"pipeline_parallel_size": 2},
    ],
    ids=str,
    indirect=True,
)
async def test_the_stream_goes_on_between_slices(watched: Watched, qwen: tuple[Path, Expected]) -> None:
    """Both images are made in slices, in turns, with tokens of the stream between them."""
    assert await watched.ask_beside() == qwen[1][0]
    ids = [id for id, _, _ in watched.slices]
    assert ids == sorted(ids) and len(set(ids)) == 2, "one after the other"
    for one in set(ids):
        parts = [until for id, until, _ in watched.slices if id == one]
        assert len(parts) > LAYERS and parts == sorted(set(parts)) and parts[-1] == 1
    assert watched.slices[-1][2] - watched.slices[0][2] >= len(ids) - 4, "a step has one slice, and a token"
    with anyio.fail_after(60):
        while len(watched.streamed) < STREAMED:
            await anyio.sleep(0.01)
    assert watched.streamed == qwen[1][1]


async def test_an_aborted_request_frees_what_it_has_begun(
    watched: Watched, qwen: tuple[Path, Expected]
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watched.ask_beside)
        await watched.begun()
        assert watched.is_under_way
        tasks.cancel_scope.cancel()
    with anyio.fail_after(60):
        while watched.is_under_way:
            await anyio.sleep(0.001)
    assert watched.encodings.num_rows == 0
    assert (await watched.ask(PROMPT, IMAGES)).token_ids == qwen[1][0]


@pytest.mark.parametrize(
    "watched", [{}, {"tensor_parallel_size": 2, "mm_enable_dp_encoder": True}], indirect=True, ids=str
)
async def test_new_ranks_encode_what_was_under_way(watched: Watched, qwen: tuple[Path, Expected]) -> None:
    found: list[list[int]] = []

    async def ask() -> None:
        found.append(await watched.ask_beside())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await watched.begun()
        assert watched.is_under_way
        os.kill(watched.engine._core.replicas[0].supervisor.ranks.pids[-1], signal.SIGKILL)
    assert found == [qwen[1][0]]
    with anyio.fail_after(60):
        while len(watched.streamed) < STREAMED:
            await anyio.sleep(0.01)
    assert watched.streamed == qwen[1][1]
    assert watched.encodings.num_encoded > len(IMAGES), "the first one began anew"
