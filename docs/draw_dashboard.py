"""Writes deploy/grafana.json, a dashboard of the server's metrics: `python docs/draw_dashboard.py`.

PANELS is the dashboard; everything else is the form that Grafana wants. Two panels stand side by side.
"""

import json
from pathlib import Path

from msgspec import Struct

from runtime.json_value import Fields

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "deploy" / "grafana.json"
WIDTH, HEIGHT = 12, 8  # of a panel, in Grafana's grid of 24 columns
SOURCE: Fields = {"type": "prometheus", "uid": "${source}"}
QUANTILES = (0.5, 0.95, 0.99)


class Panel(Struct, frozen=True):
    """One chart: its unit as Grafana names it, and a legend and a PromQL expression for each line."""

    title: str
    unit: str
    lines: dict[str, str]
    about: str = ""


def rate(metric: str, by: str = "") -> str:
    """Events a second of a counter, over the interval that suits the chart; `by` a label, or in all."""
    return f'sum{f" by ({by})" if by else ""} (rate({metric}{{instance=~"$instance"}}[$__rate_interval]))'


def total(metric: str) -> str:
    """The sum of a gauge over servers."""
    return f'sum({metric}{{instance=~"$instance"}})'


def quantiles(metric: str) -> dict[str, str]:
    """Lines for the quantiles of a histogram."""
    return {
        f"p{round(q * 100)}": f"histogram_quantile({q}, {rate(metric + '_bucket', 'le')})" for q in QUANTILES
    }


PANELS = (
    Panel(
        "Tokens a second",
        "short",
        {
            "generated": rate("runtime_generated_tokens_total"),
            "prompts": rate("runtime_prompt_tokens_total"),
            "of these, cached": rate("runtime_cached_tokens_total"),
        },
    ),
    Panel(
        "Requests a second",
        "reqps",
        {
            "taken in": rate("runtime_requests_total"),
            "clients left": rate("runtime_aborted_requests_total"),
            "refused {{status}}": rate("runtime_refused_requests_total", "status"),
        },
    ),
    Panel("Time to the first token", "s", quantiles("runtime_time_to_first_token_seconds")),
    Panel("Time between tokens", "s", quantiles("runtime_inter_token_latency_seconds")),
    Panel("Time in the queue", "s", quantiles("runtime_queue_seconds")),
    Panel("Time of a request", "s", quantiles("runtime_request_seconds")),
    Panel(
        "Running and waiting",
        "short",
        {
            "running sequences": total("runtime_running_sequences"),
            "waiting requests": total("runtime_waiting_requests"),
        },
    ),
    Panel(
        "Cache pages in use",
        "percentunit",
        {
            "in use": f"{total('runtime_used_pages')} / {total('runtime_pages')}",
            "kept for prefixes": f"{total('runtime_cached_pages')} / {total('runtime_pages')}",
        },
        "Pages of running sequences and of the prefix cache; cached ones are given up when room is needed.",
    ),
    Panel(
        "Prompt tokens found in the cache",
        "percentunit",
        {"hits": f"{rate('runtime_cached_tokens_total')} / {rate('runtime_prompt_tokens_total')}"},
    ),
    Panel(
        "Steps",
        "s",
        {"mean": f"{rate('runtime_step_seconds_sum')} / {rate('runtime_step_seconds_count')}"}
        | {"p99": f"histogram_quantile(0.99, {rate('runtime_step_seconds_bucket', 'le')})"},
        "Time of one forward pass over a batch, on the ranks.",
    ),
    Panel("Ends of sequences", "short", {"{{reason}}": rate("runtime_finished_sequences_total", "reason")}),
    Panel(
        "What went wrong",
        "short",
        {
            "ranks started again": rate("runtime_rank_restarts_total"),
            "requests given up": rate("runtime_failed_requests_total"),
            "requests that went on": rate("runtime_recovered_requests_total"),
            "preemptions": rate("runtime_preemptions_total"),
            "timeouts, {{limit}}": rate("runtime_timeouts_total", "limit"),
        },
    ),
    Panel(
        "Memory of the processes",
        "bytes",
        {"{{process}}": 'sum by (process) (runtime_resident_bytes{instance=~"$instance"})'},
    ),
    Panel("CPU of the processes", "short", {"{{process}}": rate("runtime_cpu_seconds_total", "process")}),
)


def dashboard() -> str:
    """The dashboard as JSON text."""
    panels = [_panel(number, panel) for number, panel in enumerate(PANELS)]
    whole: Fields = {
        "title": "runtime",
        "uid": "runtime-serve",
        "tags": ["runtime"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_data_source(), _instances()]},
        "panels": panels,
    }
    return json.dumps(whole, indent=1) + "\n"


def _panel(number: int, panel: Panel) -> Fields:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": number % 2 * WIDTH, "y": number // 2 * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for i, (legend, expr) in enumerate(panel.lines.items())
        ],
    }


def _data_source() -> Fields:
    return {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _instances() -> Fields:
    query = "label_values(runtime_pages, instance)"
    return {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "instance"},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    DASHBOARD.write_text(dashboard(), encoding="utf-8")
    print(f"wrote {DASHBOARD.relative_to(ROOT)}")
