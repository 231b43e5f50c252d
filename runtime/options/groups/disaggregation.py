"""Prompts, decodes and encoders on servers of their own."""

from typing import Annotated, Literal
from typing import Annotated as A

from msgspec import Meta

from runtime.options.declare import Count, Group, Port, Whole, option, superseded

_MISSING = "several ranks: it is for one card, and unproven on it"


class Disaggregation(Group, frozen=True, kw_only=True):
    """Disaggregation"""

    disaggregation_mode: A[
        Literal["null", "prefill", "decode"],
        option(
            "Which half of the work this server does: prompts, or answers.",
            note="needs a router, and --disaggregation-key-file: docs/disaggregation.md",
        ),
    ] = "null"
    disaggregation_transfer_backend: A[
        Literal["tcp", "shm", "mooncake", "nixl", "ascend", "fake", "mori"],
        option(
            "Transport of pages between the halves.",
            note="shm is for servers on one machine; mooncake, nixl, mori and ascend need their packages; "
            "fake moves nothing and makes pages up, for benchmarks",
        ),
    ] = "tcp"
    disaggregation_bootstrap_port: A[
        Port, option("Port of a prefill server at which decode servers ask for pages; 0: a free one.")
    ] = 8998
    disaggregation_key_file: A[
        str | None,
        option("File with the key that a router and its servers share; else RUNTIME_DISAGGREGATION_KEY."),
    ] = None
    disaggregation_local_prompt_tokens: A[
        Whole, option("A decode server computes prompts itself that lack fewer tokens.")
    ] = 0
    disaggregation_decode_tp: A[
        Count | None,
        superseded("Tensor parallel size of the decode servers.", "pages say how they are divided."),
    ] = None
    disaggregation_decode_dp: A[
        Count | None,
        superseded("Data parallel size of the decode servers.", "each replica asks for its own pages."),
    ] = None
    disaggregation_prefill_pp: A[
        Count, superseded("Pipeline parallel size of the prefill servers.", "pages say how they are divided.")
    ] = 1
    disaggregation_ib_device: A[
        str | None,
        option("InfiniBand devices of the transport, separated by commas.", note="for mooncake and mori"),
    ] = None
    disaggregation_decode_enable_offload_kvcache: A[
        bool, option("Let decode servers copy what they generate to host memory as well.")
    ] = False
    disaggregation_decode_enable_fake_auto: A[
        bool, option("Let a decode server make pages up when a request has no prefill server, for tests.")
    ] = False
    num_reserved_decode_tokens: A[
        Count,
        option("Tokens of room that a decode server keeps free for each sequence, if it may take them."),
    ] = 512
    disaggregation_decode_polling_interval: A[
        Count, superseded("Steps between two looks at arriving pages.", "pages are taken in as they come.")
    ] = 1
    encoder_only: A[
        bool, option("Serve the encoder of images and sounds alone, at --disaggregation-bootstrap-port.")
    ] = False
    language_only: A[bool, option("Serve the language model alone, with the encoders of --encoder-urls.")] = (
        False
    )
    encoder_transfer_backend: A[
        Literal["zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"],
        superseded(
            "Transport of encoded images.", "Rows come over a connection that both servers authenticate."
        ),
    ] = "zmq_to_scheduler"
    encoder_urls: A[
        tuple[str, ...],
        option("Addresses of the encoder servers, with their --disaggregation-bootstrap-port."),
    ] = ()
    enable_prefix_mm_cache: A[
        bool,
        superseded(
            "Let an encoder server keep encoded images.",
            "A server with --language-only keeps up to 256 MiB of rows, and asks for none of these again.",
        ),
    ] = False
    enable_pdmux: A[
        bool,
        option(
            "Compute the prompts and the decodes of a step at the same time, on parts of a card.",
            note="needs the package cuda-bindings",
            missing=_MISSING,
            devices=("cuda",),
        ),
    ] = False
    pdmux_config_path: A[
        str | None,
        option("File with the sizes of these parts, in YAML.", missing=_MISSING, devices=("cuda",)),
    ] = None
    sm_group_num: A[
        Annotated[int, Meta(ge=3)],
        option(
            "Number of ways to divide a card, by the number of decodes; two of them are the whole card.",
            missing=_MISSING,
            devices=("cuda",),
        ),
    ] = 8
