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
    mx,
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
    "mx",
    "norms",
    "prolog",
    "sampling",
    "sparse",
]
