"""Encoders on servers of their own: tokens are those of transformers; servers that die, or have another
model, are passed over."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import CapacityLimiter
from msgspec.msgpack import Decoder

import runtime
from runtime.errors import InvalidRequest, LinkError, OptionsError, StartError, Unavailable
from runtime.messages.transfer import EncodeAsk, Refused
from runtime.models.config.media_config import encoder_bytes
from runtime.transfer.key import link_key
from runtime.transfer.wire import connect
from tests.e2e.disaggregated import KEY, key_options
from tests.e2e.image_engine import COUNT, OPTIONS, Images
from tests.e2e.test_videos import video
from tests.models.make import make_checkpoint
from tests.models.make_audio import greedy_sounds, make_qwen_audio, sound
from tests.models.make_gemma_vision import greedy_gemma_vision, make_gemma_vision
from tests.models.make_media import (
    PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    greedy,
    greedy_qwen_vl,
    make_llava,
    make_qwen_vl,
    picture,
)
from tests.models.make_onevision import greedy_onevision, make_onevision
from tests.models.make_qwen3_vl import greedy_qwen3_vl, make_qwen3_vl

pytestmark = pytest.mark.anyio

TEXT, MORE = list(b"what is"), list(b" and this? ")
A, B = picture(1), picture(2, 60, 30)
PROMPT, IMAGES = [*TEXT, PLACEHOLDER, *MORE, PLACEHOLDER], [A, B]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("llava")
    model = make_llava(folder)
    return folder, greedy(model, PROMPT, IMAGES, COUNT)


@pytest.fixture
def options(tmp_path: Path, llava: tuple[Path, list[int]]) -> dict[str, Any]:
    key = key_options(tmp_path, KEY)
    return {**OPTIONS, "model_path": str(llava[0]), "disaggregation_key_file": key["disaggregation_key_file"]}


@asynccontextmanager
async def encoder(options: dict[str, Any], **more: Any) -> AsyncIterator[tuple[runtime.Engine, str]]:
    """-> an encoder server and its address"""
    given = {**options, "encoder_only": True, "disaggregation_bootstrap_port": 0, **more}
    async with runtime.Engine(**given) as engine:
        service = engine._core.encoders
        assert service is not None
        yield engine, f"http://127.0.0.1:{service.port}"


@asynccontextmanager
async def language(options: dict[str, Any], *urls: str, **more: Any) -> AsyncIterator[Images]:
    given = {**options, "language_only": True, "encoder_urls": list(urls), **more}
    async with runtime.Engine(**given) as engine:
        yield Images(engine)


@pytest.mark.parametrize("more", [{}, {"tensor_parallel_size": 2, "chunked_prefill_size": 7}], ids=str)
async def test_tokens(more: dict[str, Any], options: dict[str, Any], llava: tuple[Path, list[int]]) -> None:
    async with encoder(options) as (server, url), language(options, url, **more) as images:
        for _ in range(2):
            assert (await images.ask(PROMPT, IMAGES)).token_ids == llava[1]
        assert server._core.encoders is not None
        assert server._core.encoders.service.counts.files == 2, "equal files are encoded once"
        ready, media = server._core.replicas[0].supervisor.readies[0], server._core.model.media
        assert ready.weights_bytes == encoder_bytes(media, 4), "it has the encoder alone"
        with pytest.raises(InvalidRequest, match="encoder-only"):
            await server.generate(TEXT)


async def test_images_of_any_size(options: dict[str, Any], tmp_path: Path) -> None:
    """Their tokens have positions of row and column."""
    model = make_qwen_vl(tmp_path / "qwen", "2.5")
    expected = greedy_qwen_vl(model, PROMPT, IMAGES, COUNT)[0]
    options["model_path"] = str(tmp_path / "qwen")
    async with encoder(options) as (_, url), language(options, url, pipeline_parallel_size=2) as images:
        assert (await images.ask(PROMPT, IMAGES)).token_ids == expected
        assert await images.ask_each([(PROMPT, IMAGES)] * 4) == [expected] * 4


@pytest.mark.parametrize("family", ["gemma3", "onevision", "qwen3_vl"])
async def test_families(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Rows that are wider than embeddings, tokens that see each other, and tiles."""
    folder = tmp_path / family
    if family == "gemma3":
        expected, _ = greedy_gemma_vision(folder, make_gemma_vision(folder), PROMPT, IMAGES, COUNT)
    elif family == "onevision":
        expected, _ = greedy_onevision(make_onevision(folder), PROMPT, IMAGES, COUNT)
    else:
        expected, _ = greedy_qwen3_vl(folder, make_qwen3_vl(folder), PROMPT, IMAGES, COUNT)
    options["model_path"] = str(folder)
    async with encoder(options) as (_, url), language(options, url, chunked_prefill_size=20) as images:
        assert (await images.ask(PROMPT, IMAGES)).token_ids == expected


@pytest.mark.parametrize("kind", ["sounds", "videos"])
async def test_sounds_and_videos(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Encodings whose number of rows depends on how long a file lasts, and positions that count its time."""
    folder = tmp_path / kind
    if kind == "sounds":
        prompt, files = PROMPT, [sound(1, 7777), sound(2, 500)]
        expected = greedy_sounds(make_qwen_audio(folder), prompt, files, COUNT)[0]
    else:
        prompt, files = [*TEXT, VIDEO_PLACEHOLDER, *MORE, PLACEHOLDER], [video(2, 5, 32, 40), A]
        expected = greedy_qwen_vl(make_qwen_vl(folder, "2.5"), prompt, files, COUNT)[0]
    options["model_path"] = str(folder)
    async with encoder(options) as (server, url), language(options, url, chunked_prefill_size=7) as media:
        for _ in range(2):
            assert (await media.ask(prompt, files)).token_ids == expected
        assert server._core.encoders is not None and server._core.encoders.service.counts.files == 2
        ready = server._core.replicas[0].supervisor.readies[0]
        alone = encoder_bytes(server._core.model.media, 4)  # without biases of zeros, which ranks add
        assert ready.weights_bytes == pytest.approx(alone, rel=0.01), "it has the encoder alone"


async def test_servers_that_fail_are_passed_over(
    options: dict[str, Any], llava: tuple[Path, list[int]], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    make_llava(other, vision_feature_layer=-1)
    async with encoder(options) as (_, url), encoder(options | {"model_path": str(other)}) as (wrong, second):
        async with language(options, "127.0.0.1:1", second, url) as images:
            assert (await images.ask(PROMPT, IMAGES)).token_ids == llava[1]
            assert wrong._core.encoders is not None and wrong._core.encoders.service.counts.refused
        async with language(options, "127.0.0.1:1", second) as images:
            with pytest.raises(Unavailable, match="no encoder server"):
                await images.ask(PROMPT, IMAGES)
            assert (await images.ask(TEXT, [])).token_ids, "text needs none"


async def test_an_encoder_whose_rank_dies_comes_back(
    options: dict[str, Any], llava: tuple[Path, list[int]]
) -> None:
    async with encoder(options) as (server, url), language(options, url) as images:
        ranks = server._core.replicas[0].supervisor.ranks
        ranks._ranks[0].process.kill()
        assert (await images.ask(PROMPT, IMAGES)).token_ids == llava[1]


async def test_what_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match="encoder-urls"):
        runtime.Engine(**options, language_only=True)
    with pytest.raises(StartError, match="HOST:PORT"):
        runtime.Engine(**options, language_only=True, encoder_urls=["http://somewhere"])
    for more in ({"tensor_parallel_size": 2}, {"enable_multimodal": False}, {"language_only": True}):
        with pytest.raises(OptionsError, match="--encoder-only"):
            runtime.Engine(**options, encoder_only=True, **more)


async def test_a_model_of_text_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "text")
    options["model_path"] = str(tmp_path / "text")
    for given in ({"encoder_only": True}, {"language_only": True, "encoder_urls": ["127.0.0.1:1"]}):
        with pytest.raises(StartError, match="multimodal_models.md"):
            runtime.Engine(**options, **given)


async def test_inputs_that_cannot_be_encoded_harm_nothing(
    options: dict[str, Any], llava: tuple[Path, list[int]]
) -> None:
    """A server with the key that sends what is no image, stalls or ends."""
    async with encoder(options) as (server, url):
        encoders = server._core.encoders
        assert encoders is not None
        key, threads = link_key(KEY), CapacityLimiter(2)

        async def ask(shape: tuple[int, ...], num_bytes: int) -> Any:
            wire = await connect("127.0.0.1", encoders.port, key, threads)
            try:
                view = memoryview(bytes(num_bytes))
                question = EncodeAsk(encoders.service._identity, shape, (1, 1, 1), 16)
                await wire.send_pages(question, [view])
                return await wire.receive(Decoder(Refused))
            finally:
                wire.close()

        assert "can't be encoded" in (await ask((3, 5, 7), 4 * 105)).reason
        for shape, num_bytes in (((), 4), ((0,), 0), ((-1, 5), 4), ((1 << 20, 1 << 20), 4), ((5,), 400)):
            with pytest.raises(LinkError):
                await ask(shape, num_bytes)
        with anyio.fail_after(60):
            while encoders.service.counts.connections:
                await anyio.sleep(0.01)
        async with language(options, url) as images:
            assert (await images.ask(PROMPT, IMAGES)).token_ids == llava[1]
