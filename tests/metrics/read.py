"""Reads Prometheus text."""

import re


def sample(text: bytes, name: str) -> float:
    """The value of the one sample of this name, labels included."""
    (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text.decode(), re.MULTILINE)
    return float(value)
