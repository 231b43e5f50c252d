"""Image, video and audio input."""

from typing import Annotated as A

from runtime.options.declare import Amount, Count, Group, Json, planned


class Multimodal(Group, frozen=True, kw_only=True):
    """Images, video and audio"""

    mm_max_concurrent_calls: A[
        Count, planned("Pictures and sounds that are fetched and prepared at once.")
    ] = 32
    mm_per_request_timeout: A[Amount, planned("Seconds that preparing those of one request may take.")] = 10.0
    enable_broadcast_mm_inputs_process: A[
        bool, planned("Prepare inputs on one rank and send them to the others.")
    ] = False
    mm_process_config: A[Json | None, planned("Settings of the preparation, as JSON.")] = None
    mm_enable_dp_encoder: A[bool, planned("Spread pictures over the ranks in the encoder.")] = False
    limit_mm_data_per_request: A[
        Json | None, planned("Most pictures, videos and sounds of a request, as JSON.")
    ] = None
    disable_fast_image_processor: A[bool, planned("Prepare images with the slow processor.")] = False
    keep_mm_feature_on_device: A[bool, planned("Leave encoded inputs on the device after use.")] = False
    enable_precise_embedding_interpolation: A[
        bool, planned("Interpolate position embeddings of images corner to corner.")
    ] = False
