"""Prompts, decodes and encoders on servers of their own."""

from typing import Annotated as A
from typing import Literal

from runtime.options.declare import Count, Group, Port, on_device, planned


class Disaggregation(Group, frozen=True, kw_only=True):
    """Disaggregation"""

    disaggregation_mode: A[
        Literal["null", "prefill", "decode"], planned("Which half of the work this server does.")
    ] = "null"
    disaggregation_transfer_backend: A[
        Literal["mooncake", "nixl", "ascend", "fake", "mori"],
        planned("Transport of pages between the halves."),
    ] = "mooncake"
    disaggregation_bootstrap_port: A[
        Port, planned("Port of a prefill server on which decode servers find it.")
    ] = 8998
    disaggregation_decode_tp: A[Count | None, planned("Tensor parallel size of the decode servers.")] = None
    disaggregation_decode_dp: A[Count | None, planned("Data parallel size of the decode servers.")] = None
    disaggregation_prefill_pp: A[Count, planned("Pipeline parallel size of the prefill servers.")] = 1
    disaggregation_ib_device: A[str | None, on_device("cuda", "InfiniBand devices of the transport.")] = None
    disaggregation_decode_enable_offload_kvcache: A[
        bool, planned("Let decode servers keep pages in host memory.")
    ] = False
    disaggregation_decode_enable_fake_auto: A[
        bool, planned("Let a decode server make pages up when a request has no prefill server, for tests.")
    ] = False
    num_reserved_decode_tokens: A[
        Count, planned("Tokens of room that a decode server reserves for each new sequence.")
    ] = 512
    disaggregation_decode_polling_interval: A[
        Count, planned("Steps between two looks at arriving pages.")
    ] = 1
    encoder_only: A[bool, planned("Serve the image encoder alone.")] = False
    language_only: A[bool, planned("Serve the language model alone, with encoders elsewhere.")] = False
    encoder_transfer_backend: A[
        Literal["zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"], planned("Transport of encoded images.")
    ] = "zmq_to_scheduler"
    encoder_urls: A[tuple[str, ...], planned("Addresses of the encoder servers.")] = ()
    enable_prefix_mm_cache: A[bool, planned("Let an encoder server keep encoded images.")] = False
    enable_pdmux: A[
        bool, on_device("cuda", "Run prompts and decodes side by side on parts of one accelerator.")
    ] = False
    pdmux_config_path: A[str | None, on_device("cuda", "File with these parts.")] = None
    sm_group_num: A[Count, on_device("cuda", "Number of these parts.")] = 8
