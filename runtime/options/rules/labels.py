"""Labels that operators give to metrics."""

from collections.abc import Mapping
from re import fullmatch
from typing import Any

# of metrics/table.py
OWN = frozenset({"le", "layer", "label", "limit", "process", "reason", "status", "tenant", "event", "way"})


def labels_have_names(said: Mapping[str, Any]) -> str | None:
    labels = said["extra_metric_labels"] or {}
    wrong = [
        name
        for name in labels
        if not fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) or name in OWN or name.startswith("__")
    ]
    if wrong:
        return f"--extra-metric-labels: {', '.join(wrong)} cannot be a label (letters, digits and _, and none of {', '.join(sorted(OWN))})"
    if words := [name for name, value in labels.items() if not isinstance(value, str)]:
        return f"--extra-metric-labels: the value of {', '.join(words)} must be a string"
    return None
