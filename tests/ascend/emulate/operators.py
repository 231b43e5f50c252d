"""All emulated operators: importing the families fills the table."""

from tests.ascend.emulate import (
    attention,
    cache,
    exchange,
    experts,
    formats,
    grouped,
    latent,
    linears,
    norms,
    prolog,
    sampling,
    sparse,
)
from tests.ascend.emulate.table import OPERATORS

__all__ = [
    "OPERATORS",
    "attention",
    "cache",
    "exchange",
    "experts",
    "formats",
    "grouped",
    "latent",
    "linears",
    "norms",
    "prolog",
    "sampling",
    "sparse",
]
