"""Who decides what a request leaves open: the model, the server, or the API's own rules."""

from typing import Any

import httpx
import pytest

from runtime.errors import OptionsError
from runtime.messages.sampling import SamplingParams
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.settings import preferred_sampling
from tests.http.fake import FakeService
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
TEXT = ("/v1/completions", {"prompt": "x"})
NATIVE = ("/generate", {"text": "x"})


@pytest.mark.parametrize(
    ("route", "body", "want"),
    [
        (*CHAT, {"temperature": 0.1, "max_new_tokens": 5, "top_k": 7}),
        (*TEXT, {"temperature": 0.1, "max_new_tokens": 5, "top_k": 7}),
        (
            TEXT[0],
            TEXT[1] | {"temperature": 0.5, "max_tokens": 2},
            {"temperature": 0.5, "max_new_tokens": 2, "top_k": 7},
        ),
        # what the model would like is for OpenAI's routes, as in SGLang
        (*NATIVE, {"max_new_tokens": 5, "top_k": 7}),
        (NATIVE[0], NATIVE[1] | {"sampling_params": {"top_k": 3}}, {"max_new_tokens": 5, "top_k": 3}),
    ],
)
async def test_the_client_then_the_server_then_the_model(route: str, body: Any, want: dict[str, Any]) -> None:
    service = FakeService(defaults={"temperature": 0.1}, preferred={"max_new_tokens": 5, "top_k": 7})
    async with serving(service) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        assert (await http.post(route, json=body)).status_code == 200
    assert service.requests[0].params == SamplingParams(**want)


def test_preferences_are_checked_at_the_start() -> None:
    options = {
        "model_path": "runtime/pocket",
        "preferred_sampling_params": {"temperature": 0.3, "stop": ["x"]},
    }
    assert preferred_sampling(plan_for(from_values(options))) == options["preferred_sampling_params"]
    with pytest.raises(OptionsError, match="temprature"):
        preferred_sampling(plan_for(from_values(options | {"preferred_sampling_params": {"temprature": 1}})))
