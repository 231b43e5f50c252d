"""Figures of requests by labels of their clients, of which there may be any number."""

from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from runtime import Engine
from runtime.errors import InvalidRequest, OptionsError
from runtime.http.fields.headers import LabelHeader, read_headers
from runtime.metrics.request_labels import MAX_CHARS, MAX_SERIES, MAX_VALUES, OTHER, LabelValues
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from tests.actors.test_supervisor import NULL

HEADER = LabelHeader("x-custom-labels", ("team", "app"))


def test_a_label_has_so_many_values() -> None:
    values = LabelValues(["team"])
    assert [values.of({"team": f"{i}"}) for i in range(MAX_VALUES)] == [(f"{i}",) for i in range(MAX_VALUES)]
    assert values.of({"team": "more"}) == (OTHER,) and values.of({"team": "0"}) == ("0",)
    assert values.of({}) == ("",) and LabelValues(["team"]).of({"team": "x" * (MAX_CHARS + 1)}) == (OTHER,)


def test_labels_have_so_many_combinations() -> None:
    values = LabelValues(["a", "b"])
    found = {values.of({"a": f"{i}", "b": f"{j}"}) for i in range(MAX_VALUES) for j in range(MAX_VALUES)}
    assert len(found) == MAX_SERIES + 1 and (OTHER, OTHER) in found


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        ('{"team": "a", "app": "b"}', (("team", "a"), ("app", "b"))),
        ('{"app": "b", "unknown": "c"}', (("app", "b"),)),
        ("{}", ()),
    ],
)
def test_the_header(value: str, labels: tuple[tuple[str, str], ...]) -> None:
    assert read_headers(Headers({"x-custom-labels": value}), HEADER).labels == labels
    assert read_headers(Headers({"x-custom-labels": value})).labels == ()


@pytest.mark.parametrize("value", ["", "team=a", "[]", '{"team": 3}', '{"team"'])
def test_a_header_of_another_form(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-custom-labels must be a JSON object"):
        read_headers(Headers({"x-custom-labels": value}), HEADER)


@pytest.mark.parametrize("names", [("le",), ("a-b",), ("zone",)], ids=str)
def test_labels_must_be_some(names: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"extra_metric_labels": {"zone": "x"}, "device": "null"}
    with pytest.raises(OptionsError, match="--tokenizer-metrics-allowed-custom-labels"):
        plan_for(from_values(options | {"tokenizer_metrics_allowed_custom_labels": names}))


@pytest.mark.anyio
@pytest.mark.usefixtures("forked_children")
async def test_requests_count_under_their_labels() -> None:
    options = NULL | {"tokenizer_metrics_allowed_custom_labels": ("team", "app")}
    async with Engine(**options) as engine:
        transport = httpx.ASGITransport(engine.asgi())
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
            for headers in ({"x-custom-labels": '{"team": "a"}'}, {"x-custom-labels": '{"team": "a"}'}, {}):
                assert (await client.post("/generate", json=body, headers=headers)).status_code == 200
            wrong = await client.post("/generate", json=body, headers={"x-custom-labels": "a"})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "x-custom-labels"
        text = engine.metrics().decode()
    assert 'runtime_labelled_requests_total{team="a",app=""} 2\n' in text
    assert 'runtime_labelled_requests_total{team="",app=""} 1\n' in text
    assert 'runtime_labelled_generated_tokens_total{team="a",app=""} 8\n' in text
    assert 'runtime_labelled_request_seconds_count{team="a",app=""} 2\n' in text
    assert 'runtime_labelled_time_to_first_token_seconds_bucket{team="a",app="",le="+Inf"} 2\n' in text
