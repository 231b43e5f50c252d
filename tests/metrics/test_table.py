"""The table of metrics: names, and what is read from the system."""

import os
import re
from pathlib import Path

from runtime.messages.requests import FinishReason
from runtime.metrics import Metrics
from runtime.metrics.docs import markdown
from runtime.metrics.table import process_usage


def test_the_page_of_metrics_is_fresh() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == markdown(), "python -m runtime.metrics.docs > docs/metrics.md"


def test_names_follow_the_conventions() -> None:
    instruments = Metrics().instruments()
    assert len({one.name for one in instruments}) == len(instruments)
    for one in instruments:
        assert re.fullmatch(r"runtime_[a-z_]+", one.name) and one.help.endswith(".")
        assert (one.kind == "counter") == one.name.endswith("_total"), one.name


def test_every_line_is_exposition_text() -> None:
    metrics = Metrics()
    metrics.finished["stop"] += 2
    metrics.refused["429"] += 1
    text = metrics.render().decode()
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"\})? [-+0-9.e]+')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in text.splitlines())
    assert 'runtime_finished_sequences_total{reason="stop"} 2' in text
    assert all(f'reason="{reason.value}"' in text for reason in FinishReason)


def test_processes_are_measured() -> None:
    text = Metrics().render({"rank0": os.getpid()}).decode()
    rss = dict(re.findall(r'runtime_resident_bytes\{process="(\w+)"\} (\S+)', text))
    assert rss.keys() == {"server", "rank0"} and float(rss["rank0"]) > 2**20
    assert 'runtime_cpu_seconds_total{process="server"}' in text


def test_a_process_that_is_gone_has_no_line() -> None:
    metrics = Metrics()
    metrics.render({"rank0": os.getpid()})
    assert "rank0" not in metrics.render({"rank0": 2**22 + 1}).decode()
    assert process_usage(2**22 + 1) is None
