"""litellm against a running server, through each API that it uses."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.serving import Server, serve

MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--device", "null", "--served-model-name", "pocket") as running:
        yield running


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it looks for one on the net
        import litellm

        yield litellm


@pytest.mark.filterwarnings("default")  # of litellm itself
@pytest.mark.parametrize(
    ("model", "base"),
    [
        ("openai/pocket", "/v1"),
        ("text-completion-openai/pocket", "/v1"),
        ("anthropic/pocket", ""),
        ("ollama_chat/pocket", ""),
        ("ollama/pocket", ""),
    ],
)
def test_litellm_answers_through_every_api(server: Server, litellm: Any, model: str, base: str) -> None:
    request = {
        "model": model,
        "api_base": server.url + base,
        "api_key": "none",
        "messages": MESSAGES,
        "max_tokens": 9,
        "num_retries": 0,
    }
    whole = litellm.completion(**request)
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 9
    if "ollama" not in model:  # there litellm says stop, whatever it was told
        assert whole.choices[0].finish_reason == "length"
    chunks = list(litellm.completion(**request, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


@pytest.mark.filterwarnings("default")
def test_litellm_reports_errors_as_what_they_are(server: Server, litellm: Any) -> None:
    for model, base in (("openai/pocket", "/v1"), ("anthropic/pocket", "")):
        with pytest.raises(litellm.BadRequestError):
            litellm.completion(
                model=model,
                api_base=server.url + base,
                api_key="none",
                messages=MESSAGES,
                max_tokens=9,
                temperature=-5.0,
                num_retries=0,
            )
