"""`runtime serve --grpc-mode` as a process; vectors through it and through Ollama's API."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import ollama
import pytest

from runtime.rpc.schema import SERVICE, load
from tests.e2e.serving import serve
from tests.models.make_pooled import make_pooled

WAIT_S = 60.0
TYPES, METHODS = load()
TEXTS = ["Hello!", "Once upon a time"]


@contextmanager
def serve_grpc(*options: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """The calls of a running server, by name."""
    command = [
        sys.executable,
        "-m",
        "runtime",
        "serve",
        "--grpc-mode",
        "--port",
        "0",
        "--log-format",
        "json",
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = json.loads(next(line for line in process.stderr if "listening" in line))["url"]
        assert url.startswith("grpc://")
        with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
            calls = {
                name: (channel.unary_stream if several else channel.unary_unary)(
                    f"/{SERVICE}/{name}",
                    request_serializer=TYPES[takes].SerializeToString,
                    response_deserializer=TYPES[gives].FromString,
                )
                for name, takes, several, gives in METHODS
            }
            deadline = time.monotonic() + WAIT_S
            while calls["Health"](TYPES["HealthRequest"](), timeout=WAIT_S).state != "ready":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield calls, process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_server_of_grpc_generates_and_stops() -> None:
    with serve_grpc("--device", "null") as (calls, process):
        request = TYPES["GenerateRequest"](
            text="Once upon a time", sampling_params={"max_new_tokens": 12, "ignore_eos": True}
        )
        messages = list(calls["Generate"](request, timeout=WAIT_S))
        assert (
            sum(len(message.output_ids) for message in messages) == 12
            and messages[-1].finish.reason == "length"
        )
        process.terminate()
        assert process.wait(WAIT_S) == 0


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pooled("bert", "embed", tmp_path_factory.mktemp("bert"))


def test_vectors_are_the_same_in_every_api(bert: Path) -> None:
    with serve("--model-path", str(bert), "--served-model-name", "tiny") as server:
        wanted = [
            one.embedding
            for one in server.client.embeddings.create(
                model="tiny", input=TEXTS, encoding_format="float", extra_body={"normalize": True}
            ).data
        ]
        client = ollama.Client(host=server.url)
        embedded = client.embed("tiny", TEXTS)
        assert embedded.embeddings == wanted and (embedded.prompt_eval_count or 0) > len(TEXTS)
        assert client.embed("tiny:latest", TEXTS[0]).embeddings == wanted[:1]
        assert client.embeddings("tiny", TEXTS[0]).embedding == wanted[0]
        short = client.embed("tiny", TEXTS[0], dimensions=4).embeddings[0]
        assert len(short) == 4 and math.isclose(math.hypot(*short), 1, rel_tol=1e-5)
        long = {"model": "tiny", "input": "x" * 1000}
        assert httpx.post(server.url + "/api/embed", json=long).status_code == 200
        refused = httpx.post(server.url + "/api/embed", json=long | {"truncate": False})
        assert refused.status_code == 400 and isinstance(refused.json()["error"], str)
        assert client.show("tiny").capabilities == ["embedding"]
        client.close()
    with serve_grpc("--model-path", str(bert)) as (calls, _):
        answer = calls["Embed"](TYPES["EmbedRequest"](texts=TEXTS, normalize=True), timeout=WAIT_S)
        assert [list(one.values) for one in answer.embeddings] == [
            pytest.approx(one, abs=1e-6) for one in wanted
        ]
        with pytest.raises(grpc.RpcError) as error:
            calls["Embed"](TYPES["EmbedRequest"](), timeout=WAIT_S)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_hidden_states_and_embeddings(checkpoint: Callable[[str], Path]) -> None:
    """As over HTTP (tests/e2e/test_hidden.py), in float32 on both ways."""
    sampling: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True, "temperature": 0}
    options = (
        "--model-path",
        str(checkpoint("llama")),
        "--dtype",
        "float32",
        "--num-threads",
        "1",
        "--enable-return-hidden-states",
    )
    with serve(*options) as server:
        plain = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_hidden_states": True}
        whole = httpx.post(server.url + "/generate", json=plain, timeout=WAIT_S).json()
        first, *rest = whole["meta_info"]["hidden_states"]
    with serve_grpc(*options) as (calls, _):
        request = TYPES["GenerateRequest"](
            input_ids=[5, 6, 7], sampling_params=sampling, return_hidden_states=True
        )
        messages = list(calls["Generate"](request, timeout=WAIT_S))
        rows = [list(row.values) for message in messages for row in message.hidden_states]
        assert rows == [pytest.approx(row, abs=1e-5) for row in [*first, *rest]]
        stopped = TYPES["GenerateRequest"](
            input_ids=[5, 6, 7], sampling_params=sampling | {"stop_regex": [".|\\n"], "max_new_tokens": 100}
        )
        assert list(calls["Generate"](stopped, timeout=WAIT_S))[-1].finish.matched == ".|\\n"
        embedded = TYPES["GenerateRequest"](
            input_embeds=[{"values": row} for row in first], sampling_params=sampling
        )
        assert sum(len(message.output_ids) for message in calls["Generate"](embedded, timeout=WAIT_S)) == 5
        with pytest.raises(grpc.RpcError) as error:
            list(
                calls["Generate"](TYPES["GenerateRequest"](input_embeds=[{"values": [1.0]}]), timeout=WAIT_S)
            )
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "takes 64" in error.value.details()
