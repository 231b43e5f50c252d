"""Options by the names that other systems have for them, and by names of old.

A spelling either means an option of ours, to which its value passes on (translated by `values` where the
words differ), or it has a status of its own, with the reason. Those of RTP-LLM stand in rtp_llm.py.
"""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from runtime.options.declare import Status


class Alias(Struct, frozen=True, kw_only=True):
    """One foreign flag. `means` is a flag of ours; without it `status` and `note` say what becomes of the
    option."""

    flag: str
    group: Literal["old", "rtp_llm"]
    default: Any
    help: str
    means: str = ""
    values: Mapping[str, Any] = {}  # our value for each of their words, in lower case; other words pass on
    status: Status = "planned"
    note: str = ""
    device: str = ""


TITLES = {"old": "Old spellings", "rtp_llm": "Options of RTP-LLM"}


def _old(flag: str, means: str, value: str) -> Alias:
    return Alias(
        flag=flag,
        group="old",
        default=False,
        help=f"Old spelling of {means} {value}.",
        means=means,
        values={"true": value},
    )


OLD = (
    Alias(
        flag="--hybrid-kvcache-ratio",
        group="old",
        default=None,
        help="Old spelling of --swa-full-tokens-ratio.",
        means="--swa-full-tokens-ratio",
    ),
    _old("--enable-ep-moe", "--moe-a2a-backend", "none"),
    _old("--enable-deepep-moe", "--moe-a2a-backend", "deepep"),
    _old("--enable-flashinfer-cutlass-moe", "--moe-runner-backend", "flashinfer_cutlass"),
    _old("--enable-flashinfer-cutedsl-moe", "--moe-runner-backend", "flashinfer_cutedsl"),
    _old("--enable-flashinfer-trtllm-moe", "--moe-runner-backend", "flashinfer_trtllm"),
    _old("--enable-triton-kernel-moe", "--moe-runner-backend", "triton_kernel"),
    _old("--enable-flashinfer-mxfp4-moe", "--moe-runner-backend", "flashinfer_mxfp4"),
)
