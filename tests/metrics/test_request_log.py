"""Accounts of requests: what is written where, at which level, and what is not."""

import gc
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from runtime import log
from runtime.errors import OptionsError, StartError
from runtime.messages.requests import Chat, GenerateRequest, Infill, Prompt, Text, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.messages.tenants import Tenant
from runtime.metrics import heartbeat
from runtime.metrics.request_log import as_text, open_folder
from runtime.metrics.request_records import MAX_CHARS, Record, as_json
from runtime.options.parse import from_values
from runtime.options.resolve import plan_for
from runtime.settings import bounds_of
from tests.test_core import ask, running, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    log.setup("info", "json", stream)
    yield stream
    log.silence()


def read(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
async def test_a_line_at_each_end_of_a_request(level: int, tmp_path: Path) -> None:
    async with running(
        log_requests=True,
        log_requests_level=level,
        log_requests_format="json",
        log_requests_target=[str(tmp_path / "log")],
    ) as core:
        sink = ask(core, "one", max_new_tokens=4, temperature=0.5, stop=("secret",), n=2)
        await until(lambda: len(sink.finishes) == 2)
        gone = ask(core, "gone", max_new_tokens=1000)
        await until(lambda: gone.token_ids())
        core.abort("gone")
        await anyio.sleep(0.01)
    received, finished, _, left = read(tmp_path / "log")
    assert [(line["event"], line["rid"]) for line in (received, finished)] == [
        ("request.received", "one"),
        ("request.finished", "one"),
    ]
    assert (finished["prompt_tokens"], finished["completion_tokens"], finished["finish_reasons"]) == (
        3,
        8,
        ["length"] * 2,
    )
    assert 0 < finished["ttft_s"] <= finished["e2e_s"] and left["finish_reasons"] == ["abort"]
    params = received.get("sampling_params")
    assert (
        params
        == [
            None,
            {"n": 2, "max_new_tokens": 4, "temperature": 0.5, "stop": "(hidden)"},
            *[{"n": 2, "max_new_tokens": 4, "temperature": 0.5, "stop": ["secret"]}] * 2,
        ][level]
    )
    assert ("input" in received) == ("output" in finished) == (level >= 2)
    if level >= 2:
        assert received["input"] == [1, 2, 3] and [len(text) for text in finished["output"]] == [4, 4]


async def test_without_the_options_a_sink_is_what_it_was() -> None:
    async with running() as core:
        sink = ask(core, "one", max_new_tokens=4)
        assert (
            core._intake._records.watch(
                GenerateRequest(id="x", prompt=Tokens([1]), params=SamplingParams(), arrival_s=0), sink
            )
            is sink
        )
        assert not core._intake._records.open


@pytest.mark.parametrize(
    ("prompt", "beginning", "whole"),
    [
        (Text("x" * 3000), "x" * MAX_CHARS + "...", "x" * 3000),
        (Infill("a", "b"), ["a", "b"], ["a", "b"]),
        (Tokens(list(range(3000))), list(range(MAX_CHARS)), list(range(3000))),
        (Chat([{"role": "user", "content": "hi"}]), *['{"messages":[{"role":"user","content":"hi"}]}'] * 2),
    ],
)
def test_words_only_where_the_level_says_so(prompt: Prompt, beginning: Any, whole: Any) -> None:
    record = Record(
        GenerateRequest(
            id="a",
            prompt=prompt,
            params=SamplingParams(),
            arrival_s=0,
            cache_salt="salt",
            tenant=Tenant("who"),
        )
    )
    found = [record.input_fields(level) for level in range(4)]
    assert [fields.get("input") for fields in found] == [None, None, beginning, whole]
    assert not any("salt" in json.dumps(fields) or "who" in json.dumps(fields) for fields in found)


async def test_what_ran_when_a_rank_died_is_written(tmp_path: Path, lines: io.StringIO) -> None:
    async with running(null_step_s=0.002, crash_dump_folder=str(tmp_path), log_requests_level=3) as core:
        first, lives = ask(core, "first", max_new_tokens=2), ask(core, "lives", max_new_tokens=60)
        await until(lambda: first.finishes and len(lives.token_ids()) > 2)
        os.kill(core.replicas[0].supervisor.ranks.pids[0], signal.SIGKILL)
        await until(lambda: lives.finishes)
    crash, *requests = read(tmp_path)
    assert (crash["event"], crash["rank"], crash["exit_code"]) == ("crash", 0, -9)
    assert [(each["rid"], each["state"], each["input"]) for each in requests] == [
        ("first", "ended", [1, 2, 3]),
        ("lives", "running", [1, 2, 3]),
    ]
    assert requests[1]["output"][0] and "the last requests were written" in lines.getvalue()


async def test_figures_in_files_lines_and_histograms(tmp_path: Path, lines: io.StringIO) -> None:
    async with running(
        export_metrics_to_file=True,
        export_metrics_to_file_dir=str(tmp_path),
        enable_request_time_stats_logging=True,
        collect_tokens_histogram=True,
        prompt_tokens_buckets=("custom", "2", "3"),
        decode_log_interval=3,
        bucket_e2e_request_latency=(1.0, 60.0),
        extra_metric_labels={"zone": 'a"b'},
    ) as core:
        sink = ask(core, "one", max_new_tokens=6, stop=("words",))
        await until(lambda: sink.finishes)
        text = core.metrics().decode()
    (figures,) = read(tmp_path)
    assert figures["completion_tokens"] == 6 and figures["sampling_params"]["stop"] == "(hidden)"
    logged = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["completion_tokens"] for line in logged if line["event"] == "request.figures"] == [6]
    assert [line for line in logged if line["part"] == "steps" and line["steps"] >= 3]
    assert 'runtime_prompt_length_tokens_bucket{zone="a\\"b",le="2"} 0' in text
    assert 'runtime_prompt_length_tokens_bucket{zone="a\\"b",le="3"} 1' in text
    assert 'runtime_answer_length_tokens_sum{zone="a\\"b"} 6' in text
    assert [
        line.split('le="')[1].split('"')[0]
        for line in text.splitlines()
        if line.startswith("runtime_request_seconds_bucket")
    ] == ["1", "60", "+Inf"]


def test_bounds_in_words() -> None:
    assert (
        bounds_of(None) is None
        and bounds_of(("default",)) is None
        and bounds_of(("custom", "7", "2")) == (7, 2)
    )
    assert sorted(bounds_of(("tse", "1000", "2", "8")) or ()) == [
        984,
        992,
        996,
        998,
        1000,
        1002,
        1004,
        1008,
        1016,
    ]


@pytest.mark.parametrize("labels", [{"le": "x"}, {"a-b": "x"}, {"zone": 3}], ids=str)
def test_labels_must_be_some(labels: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match="--extra-metric-labels"):
        plan_for(from_values({"device": "null", "extra_metric_labels": labels}))


def test_a_folder_that_cannot_be_written_is_found_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="choose another folder"):
        open_folder(tmp_path / "file")


def test_any_text_makes_a_line() -> None:
    assert as_json({"a": "\ud800", "b": object}) == '{"a": "\\ud800", "b": "<class \'object\'>"}'


def test_a_text_line_is_one_line() -> None:
    assert as_text({"timestamp": "now", "event": "e", "input": "a\nb", "n": 2}) == 'now e input="a\\nb" n=2'


def test_long_collections_are_reported(lines: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 10.5, 20.0, 23.0])
    with heartbeat.log_long_collections(0.0):
        assert not [callback for callback in gc.callbacks if "long_collections" in callback.__qualname__]
    before = list(gc.callbacks)
    gc.disable()
    try:
        monkeypatch.setattr(heartbeat, "monotonic", lambda: next(clock))
        with heartbeat.log_long_collections(1.0):
            gc.collect()
            assert not lines.getvalue()
            gc.collect()
    finally:
        gc.enable()
    assert json.loads(lines.getvalue())["seconds"] == 3.0 and gc.callbacks == before
