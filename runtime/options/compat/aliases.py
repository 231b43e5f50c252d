"""Aliases of options: names of other systems, and former names.

An alias either stands for an option of ours, to which its value passes on (translated by `values` where the
words differ), or it has a status of its own, with the reason. rtp_llm.py has the aliases of RTP-LLM.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from runtime.options.declare import Status, Value


class Alias(Struct, frozen=True, kw_only=True):
    """One foreign flag. `means` is the flag of ours that it stands for; without it, `status` and `note`
    describe what becomes of the option."""

    flag: str
    group: Literal["old", "rtp_llm"]
    default: Value
    help: str
    means: str = ""
    values: Mapping[str, Value] = {}  # our value for each of their words, in lower case; other words pass on
    status: Status = "refused"
    note: str = ""
    device: str = ""


TITLES = {"old": "Former names", "rtp_llm": "Options of RTP-LLM"}


def _old(flag: str, means: str, value: str) -> Alias:
    return Alias(
        flag=flag,
        group="old",
        default=False,
        help=f"Former name of {means} {value}.",
        means=means,
        values={"true": value},
    )


OLD = (
    Alias(
        flag="--hybrid-kvcache-ratio",
        group="old",
        default=None,
        help="Former name of --swa-full-tokens-ratio.",
        means="--swa-full-tokens-ratio",
    ),
    _old("--enable-ep-moe", "--expert-parallel-size", "tp"),
    _old("--enable-deepep-moe", "--moe-a2a-backend", "deepep"),
    _old("--enable-flashinfer-cutlass-moe", "--moe-runner-backend", "flashinfer_cutlass"),
    _old("--enable-flashinfer-cutedsl-moe", "--moe-runner-backend", "flashinfer_cutedsl"),
    _old("--enable-flashinfer-trtllm-moe", "--moe-runner-backend", "flashinfer_trtllm"),
    _old("--enable-triton-kernel-moe", "--moe-runner-backend", "triton_kernel"),
    _old("--enable-flashinfer-mxfp4-moe", "--moe-runner-backend", "flashinfer_mxfp4"),
)
