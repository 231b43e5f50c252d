"""The gRPC server with grpc's own client: the same answers, checks and keys as over HTTP."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import httpx
import pytest
import uvloop

from runtime.errors import InternalFault, InvalidRequest, Overloaded, StartError, Unavailable
from runtime.http.app import http_app
from runtime.http.auth import Keys
from runtime.http.server import tls_context
from runtime.http.settings import DEFAULT, HttpSettings
from runtime.rpc.schema import SERVICE, SOURCE, load, read
from runtime.rpc.server import Rpc, credentials_of
from tests.http.fake import FakeService
from tests.http.serving import stepping
from tests.http.test_tls import make

pytestmark = pytest.mark.anyio
TYPES, METHODS = load()


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """grpc has a loop's reader of its own, so both loops are tried."""
    return "asyncio", {"loop_factory": uvloop.new_event_loop} if request.param == "uvloop" else {}


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


class Client:
    """Calls by name, as generated code would make them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        for name, _, several, gives in METHODS:
            make = channel.unary_stream if several else channel.unary_unary
            setattr(
                self,
                name.lower(),
                make(
                    f"/{SERVICE}/{name}",
                    request_serializer=_bytes,
                    response_deserializer=TYPES[gives].FromString,
                ),
            )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    async def collect(self, **fields: Any) -> list[Any]:
        return [message async for message in self.generate(TYPES["GenerateRequest"](**fields))]


@asynccontextmanager
async def talking(service: FakeService, settings: HttpSettings = DEFAULT) -> AsyncIterator[Client]:
    shutdown = anyio.Event()
    rpc = Rpc(service, settings, "127.0.0.1", 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rpc.serve, shutdown)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rpc.port}") as channel:
            yield Client(channel)
        shutdown.set()


@asynccontextmanager
async def refused(code: grpc.StatusCode, message: str = "", param: str | None = None) -> AsyncIterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        yield
    assert error.value.code() == code and message in (error.value.details() or "")
    assert dict(error.value.trailing_metadata() or ()).get("param") == param


async def test_a_generation_streams_what_http_says_whole() -> None:
    service = FakeService(hold=True)
    sampling: dict[str, Any] = {
        "n": 2,
        "max_new_tokens": 6,
        "temperature": 0.5,
        "stop": ["x"],
        "stop_regex": ["y+"],
        "logit_bias": {3: 1.5},
        "sampling_seed": 2**60,
    }
    async with talking(service) as client, stepping(service):
        messages = await client.collect(
            rid="mine",
            text="hi",
            sampling_params=sampling,
            return_logprob=True,
            top_logprobs_num=2,
            priority=3,
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(http_app(service)), base_url="http://test"
        ) as http:
            whole = (
                await http.post(
                    "/generate", json={"text": "hi", "sampling_params": {"n": 2, "max_new_tokens": 6}}
                )
            ).json()
    for index in range(2):
        mine = [message for message in messages if message.index == index]
        assert len(mine) > 1 and {message.rid for message in mine} == {"mine"}
        assert "".join(message.text for message in mine) == whole[index]["text"]
        assert [i for message in mine for i in message.output_ids] == whole[index]["output_ids"]
        assert [message.HasField("finish") for message in mine] == [False] * (len(mine) - 1) + [True]
        end, meta = mine[-1].finish, whole[index]["meta_info"]
        assert (end.reason, end.completion_tokens, end.prompt_tokens, end.cached_tokens) == (
            "length",
            6,
            meta["prompt_tokens"],
            meta["cached_tokens"],
        )
        logprobs = [token for message in mine for token in message.logprobs]
        assert len(logprobs) == 6 and [top.logprob for top in logprobs[0].top] == [-0.5, -1.5]
    first = service.requests[0]
    assert (first.params.temperature, first.params.logit_bias, first.params.seed, first.priority) == (
        0.5,
        {3: 1.5},
        2**60,
        3,
    )
    assert first.params.stop == ("x",) and first.params.stop_regex == ("y+",)


async def test_what_is_wrong_is_refused_as_over_http() -> None:
    service = FakeService()
    async with talking(service) as client:
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "text", "text"):
            await client.collect()
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "temperature", "sampling_params.temperature"):
            await client.collect(text="hi", sampling_params={"temperature": -1})
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "token ids", "input_ids"):
            await client.collect(input_ids=[5, 10**6])
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "--is-embedding"):
            await client.embed(TYPES["EmbedRequest"](texts=["hi"]))
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "rid", "rid"):
            await client.abort(TYPES["AbortRequest"]())
        for error, code in (
            (Overloaded("full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
            (Unavailable("later"), grpc.StatusCode.UNAVAILABLE),
            (InternalFault("oh"), grpc.StatusCode.INTERNAL),
        ):
            service.refuse = error
            async with refused(code, error.message):
                await client.collect(text="hi")
        service.refuse, service.fail_after, service.fail_with = None, 3, InvalidRequest("it broke")
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "it broke"):
            await client.collect(text="hi")
        service.fail_after = None
        assert await client.collect(input_ids=[5, 6])
    assert not service.running


async def test_who_leaves_aborts_the_request() -> None:
    service = FakeService(hold=True)
    async with talking(service) as client:
        call = client.generate(TYPES["GenerateRequest"](text="hi"))
        while not service.running:
            await anyio.sleep(0.001)
        service.step()
        assert (await call.read()).text
        call.cancel()
        with anyio.fail_after(20):
            while service.running:
                await anyio.sleep(0.001)
    assert len(service.aborted) == 1


async def test_health_and_abort_reach_the_service() -> None:
    service = FakeService(state="paused")
    async with talking(service) as client:
        health = await client.health(TYPES["HealthRequest"]())
        assert (health.state, health.model) == ("paused", "org/fake")
        assert (await client.abort(TYPES["AbortRequest"](rid="x-"))).aborted == 2
    assert service.controls.calls == [("abort", "x-")]


async def test_keys_are_those_of_http() -> None:
    service = FakeService()
    async with talking(service, HttpSettings(keys=Keys(("k",), "a"))) as client:
        await client.health(TYPES["HealthRequest"]())
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.generate(TYPES["GenerateRequest"](text="hi"), metadata=metadata).read()
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert not service.requests
        for header in (("authorization", "Bearer k"), ("x-api-key", "k")):
            assert (
                await client.generate(TYPES["GenerateRequest"](text="hi"), metadata=(header,)).read()
            ).text
        assert len({one.tenant.name for one in service.requests}) == 1
        assert service.requests[0].tenant.name.startswith("key-")
        for key, code in (("k", grpc.StatusCode.UNAUTHENTICATED), ("a", None)):
            call = client.abort(TYPES["AbortRequest"](rid="x"), metadata=(("x-api-key", key),))
            assert (await call.code()) == (code or grpc.StatusCode.OK)


async def test_a_call_is_of_its_tenant() -> None:
    service = FakeService()
    async with talking(service, HttpSettings(keys=Keys({"k1": "alice", "k2": "bob"}))) as client:
        for key in ("k1", "k2"):
            metadata = (("x-api-key", key),)
            await client.generate(TYPES["GenerateRequest"](text="hi"), metadata=metadata).read()
            await client.abort(TYPES["AbortRequest"](rid="x"), metadata=metadata)
    assert [request.tenant.name for request in service.requests] == ["alice", "bob"]
    assert [(tenant.name, tenant.sees_all) for tenant in service.controls.tenants] == [
        ("alice", False),
        ("bob", False),
    ]


async def test_a_bug_ends_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    async with talking(service) as client:
        monkeypatch.setattr(FakeService, "health", lambda _: 1 / 0)
        async with refused(grpc.StatusCode.INTERNAL, "its log"):
            await client.health(TYPES["HealthRequest"]())
        assert await client.collect(text="hi")


async def test_a_port_in_use_is_an_error_of_the_start() -> None:
    first = Rpc(FakeService(), DEFAULT, "127.0.0.1", 0)
    with pytest.raises(StartError, match="--port"):
        Rpc(FakeService(), DEFAULT, "127.0.0.1", first.port)
    await first.server.stop(0)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_tls_is_that_of_the_files(tmp_path: Path) -> None:
    certificate = make(tmp_path, "server")
    key = str(certificate.with_suffix(".key"))
    checked = tls_context(str(certificate), key, None, None)
    credentials = credentials_of(str(certificate), key, None, None, checked)
    assert credentials is not None and credentials_of(None, None, None, None, None) is None
    with pytest.raises(StartError, match="--ssl-keyfile-password"):
        credentials_of(str(certificate), key, "secret", None, checked)
    shutdown = anyio.Event()
    rpc = Rpc(FakeService(), DEFAULT, "127.0.0.1", 0, credentials)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rpc.serve, shutdown)
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{rpc.port}", trusted) as channel:
            assert await Client(channel).collect(text="hi")
        shutdown.set()


def test_the_file_is_read_to_its_last_line() -> None:
    file, methods = read(SOURCE.read_text())
    assert [name for name, *_ in methods] == ["Health", "Generate", "Embed", "Abort"]
    sampling = next(message for message in file.message_type if message.name == "SamplingParams")
    assert len(sampling.field) == 24 and sampling.nested_type[0].options.map_entry
    with pytest.raises(ValueError, match="oneof"):
        read("message X { oneof a { string b = 1; } }")


async def test_bytes_that_are_no_message_are_refused_after_authentication() -> None:
    async with talking(FakeService()) as client:
        for data in (b"\xff\xff\xff\xff", b"\x0a\xff\xff\xff\x7f"):
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, "no GenerateRequest of runtime.proto"):
                assert [message async for message in client.generate(data)] == []
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, "no EmbedRequest of runtime.proto"):
                await client.embed(data)
    async with (
        talking(FakeService(), HttpSettings(keys=Keys(("secret",)))) as client,
        refused(grpc.StatusCode.UNAUTHENTICATED),
    ):
        await client.embed(b"\xff")


async def test_no_new_tokens_and_hidden_states() -> None:
    async with talking(FakeService()) as client:
        (silent,) = await client.collect(
            text="hi", sampling_params={"max_new_tokens": 0}, return_hidden_states=True
        )
    assert (silent.text, list(silent.output_ids), silent.finish.reason, silent.finish.completion_tokens) == (
        "",
        [],
        "length",
        0,
    )
    assert [list(row.values) for row in silent.hidden_states] == [[0.0, -1.0], [1.0, -1.0]]
