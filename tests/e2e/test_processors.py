"""Logit processors through the whole runtime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

import runtime
from runtime.errors import InternalFault, InvalidRequest
from runtime.http.app import http_app
from runtime.messages.sampling import Processor
from tests.http.serving import serving

HERE = "tests.layers.sampling.test_processors"
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "enable_custom_logit_processor": True,
    "logit_processors": [f"{HERE}:Only", f"{HERE}:Angry"],
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "more", [{}, {"tp_size": 2}, {"disable_overlap_schedule": True, "chunked_prefill_size": 2}], ids=str
)
async def test_a_request_chooses_one_by_name(checkpoint: Callable[[str], Path], more: dict[str, Any]) -> None:
    async with runtime.Engine(model_path=str(checkpoint("llama")), **OPTIONS, **more) as engine:
        plain = await engine.generate([5, 6, 7], **GREEDY)
        answers: dict[str, Any] = {}

        async def ask(name: str, **sampling: Any) -> None:
            try:
                answers[name] = (await engine.generate([5, 6, 7], **GREEDY, **sampling)).token_ids
            except InternalFault as error:
                answers[name] = error

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: ask("plain"))
            tasks.start_soon(lambda: ask("only", processor=Processor("Only", {"first": 20})))
            tasks.start_soon(lambda: ask("angry", processor=Processor("Angry")))
        assert answers["plain"] == plain.token_ids and answers["only"] == [20, 21, 22, 23, 24, 25]
        assert "logit processor failed" in answers["angry"].message
        with pytest.raises(InvalidRequest, match="it has Only, Angry"):
            await engine.generate([5], processor=Processor("Other"))


async def test_over_http(checkpoint: Callable[[str], Path]) -> None:
    async with (
        runtime.Engine(model_path=str(checkpoint("llama")), **OPTIONS) as engine,
        serving(http_app(engine._core)) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as http,
    ):
        body = {
            "input_ids": [5, 6, 7],
            "custom_logit_processor": "Only",
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": 3,
                "ignore_eos": True,
                "custom_params": {"first": 30},
            },
        }
        assert (await http.post("/generate", json=body)).json()["output_ids"] == [30, 31, 32]
        pickled = await http.post("/generate", json=body | {"custom_logit_processor": '{"callable": "8004"}'})
        assert pickled.status_code == 400 and pickled.json()["error"]["param"] == "custom_logit_processor"
        assert "--logit-processors" in pickled.json()["error"]["message"]
