"""The tokenizer actor with images: files that came before are neither loaded nor prepared again."""

from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest

from runtime.actors.channels import Channel
from runtime.actors.open_requests import OpenRequests
from runtime.actors.tokenizer import TokenizerActor
from runtime.errors import InvalidRequest
from runtime.media.loader import check_counts
from runtime.media_kind import MediaKind
from runtime.messages.media import Media, MediaSource
from runtime.messages.requests import GenerateRequest, Request, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.messages.scheduler import Arrive, ToScheduler
from runtime.messages.tenants import Tenant
from runtime.text.media_prompts import MediaPrompts, Prepared
from tests.actors.sink import ListSink
from tests.actors.test_tokenizer import LIMITS, LLAMA, TEMPLATES

pytestmark = pytest.mark.anyio

MARK, ROW = 7, 8  # the placeholder, and each of the two tokens of an image
A, B = (b64encode(name).decode() for name in (b"an image", b"another image"))


class Loader:
    """Files are their own pixels."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def check(self, sources: Sequence[MediaSource]) -> None:
        check_counts(sources, {MediaKind.IMAGE: 2})

    def hold(self, values: np.ndarray) -> None:
        """Counts nothing."""

    async def load(self, sources: Sequence[MediaSource]) -> list[Media]:
        self.loaded += [one.base64 or one.url for one in sources]
        return [
            Media(
                kind=one.kind,
                param=one.param,
                digest=(one.base64 or one.url).encode(),
                values=np.zeros((1, 2, 2, 3), np.uint8),
            )
            for one in sources
        ]


class Processor:
    placeholder_ids = {MediaKind.IMAGE: MARK}
    sounds = None
    is_attended = False

    def prepare(self, media: Media) -> Prepared:
        return Prepared(
            kind=media.kind,
            digest=media.digest,
            values=np.zeros(4, np.float32),
            token_ids=[ROW, ROW],
            positions=np.arange(2, dtype=np.int32),
        )


class Progress:
    def __init__(self) -> None:
        self.num_known, self.num_loaded, self.num_tokenized = 0, 0, 0

    def known(self, request_id: str, count: int) -> None:
        self.num_known += count

    def loaded(self, request_id: str, media: Sequence[Media]) -> None:
        self.num_loaded += len(media)

    def tokenized(self, request_id: str) -> None:
        self.num_tokenized += 1


class Bench:
    """A running actor with its surroundings."""

    def __init__(self, kept_bytes: int, *, isolates_tenants: bool) -> None:
        self.loader, self.progress = Loader(), Progress()
        self._arrived: list[ToScheduler] = []
        self._open_requests = OpenRequests()
        self.inbox = Channel[GenerateRequest](100)
        self.actor = TokenizerActor(
            LLAMA,
            TEMPLATES,
            self._open_requests,
            self.inbox,
            self._arrived.append,
            limits=LIMITS,
            isolates_tenants=isolates_tenants,
            media=MediaPrompts(Processor(), self.loader, LLAMA, kept_bytes=kept_bytes),
            progress=self.progress,
        )

    async def ask(self, *files: str, tenant: str = "t", salt: str = "") -> Request:
        """The request of these images, in base64 or behind URLs, as it goes to the scheduler."""
        sources = [
            MediaSource(kind=MediaKind.IMAGE, param=f"image[{i}]", **{"url" if ":" in one else "base64": one})
            for i, one in enumerate(files)
        ]
        request = GenerateRequest(
            id="r",
            prompt=Tokens([5] + [MARK] * len(files)),
            params=SamplingParams(),
            arrival_s=0,
            media=tuple(sources),
            tenant=Tenant(tenant),
            cache_salt=salt,
        )
        sink = ListSink()
        self._open_requests.open("r", sink, request)
        self.inbox.send_nowait(request)
        with anyio.fail_after(30):
            while not self._arrived and not sink.errors:
                await anyio.sleep(0.001)
        if sink.errors:
            raise sink.errors[0]
        message = self._arrived.pop()
        assert isinstance(message, Arrive)
        self._open_requests.close("r")
        return message.request


@asynccontextmanager
async def running(kept_bytes: int = 1000, *, isolates_tenants: bool = False) -> AsyncIterator[Bench]:
    bench = Bench(kept_bytes, isolates_tenants=isolates_tenants)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.actor.run)
        yield bench
        bench.inbox.close()
    bench.inbox.discard()


async def test_an_image_that_came_before_is_not_loaded_again() -> None:
    async with running() as bench:
        first = await bench.ask(A)
        again = await bench.ask(A)
        assert again.prompt_ids == first.prompt_ids == [5, ROW, ROW]
        assert (
            again.media[0].digest == first.media[0].digest and again.media[0].values is first.media[0].values
        )
        assert bench.loader.loaded == [A]
        await bench.ask(A, B)  # one of these is new, so both are loaded
        await bench.ask(A, B)
        await bench.ask(B, A)  # in another order they may be prepared otherwise
        assert bench.loader.loaded == [A, A, B, B, A]
        progress = bench.progress
        assert (progress.num_known, progress.num_loaded, progress.num_tokenized) == (3, 5, 5)


async def test_what_a_url_names_is_loaded_each_time() -> None:
    async with running() as bench:
        for _ in range(2):
            await bench.ask("https://example.com/a.png")
        await bench.ask(A, "https://example.com/a.png")
        await bench.ask(A, "https://example.com/a.png")
        assert len(bench.loader.loaded) == 6 and bench.progress.num_known == 0


async def test_nothing_is_kept_where_there_is_no_room() -> None:
    async with running(kept_bytes=0) as bench:
        await bench.ask(A)
        await bench.ask(A)
        assert bench.loader.loaded == [A, A]


@pytest.mark.parametrize("isolates", [False, True], ids=["shared", "isolated"])
async def test_tenants_and_salts_learn_nothing_of_each_other(isolates: bool) -> None:
    async with running(isolates_tenants=isolates) as bench:
        await bench.ask(A, tenant="t")
        await bench.ask(A, tenant="u")
        assert len(bench.loader.loaded) == 1 + isolates
        await bench.ask(A, tenant="t", salt="s")
        assert len(bench.loader.loaded) == 2 + isolates


async def test_limits_hold_for_what_is_known() -> None:
    async with running() as bench:
        await bench.ask(A, A)
        with pytest.raises(InvalidRequest, match="--limit-mm-data-per-request") as caught:
            await bench.ask(A, A, A)
        assert caught.value.param == "image[2]"
