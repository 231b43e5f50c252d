"""Metrics: one table (table.py) of instruments (instruments.py) that are cheap enough for the step path."""

from runtime.metrics.table import Metrics

__all__ = ["Metrics"]
