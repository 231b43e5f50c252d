"""How ranks that share sequences in attention divide the tokens of a prompt (docs/parallelism.md)."""

from typing import Literal

PromptSplit = Literal["in-seq-split", "round-robin-split"]
