"""Image, video and audio input."""

from typing import Annotated as A

from msgspec import Meta

from runtime.options.declare import Count, Group, Json, option, superseded

Timeout = A[float, Meta(gt=0)]
HostMemory = A[float, Meta(ge=1.0, le=65536.0)]


class Multimodal(Group, frozen=True, kw_only=True):
    """Images, video and audio"""

    mm_max_concurrent_calls: A[Count, option("Images, videos and sounds that are fetched at once.")] = 32
    mm_per_request_timeout: A[
        Timeout, option("Seconds that fetching and decoding the media of one request may take.")
    ] = 10.0
    allowed_media_domains: A[
        tuple[str, ...],
        option(
            "Hosts that media may be fetched from; without it, every host whose addresses are public.",
            note="a host that is named may have private addresses, too, but none of link-local (metadata "
            "services), unless the address itself is named",
        ),
    ] = ()
    allowed_local_media_path: A[
        str | None, option("Folder whose files requests may name by file: URLs; without it, none.")
    ] = None
    enable_broadcast_mm_inputs_process: A[
        bool,
        superseded(
            "Prepare inputs on one rank and send them to the others.",
            "Inputs are always prepared once, beside the ranks, and sent to all of them.",
        ),
    ] = False
    mm_process_config: A[
        Json | None,
        option(
            "Settings of the preparation of images and videos, as JSON.",
            note="image: min_pixels, max_pixels; video: these, fps, num_frames, max_frames. Pixels are for "
            "models whose images may have any size (Qwen-VL, GLM-4.1V); sounds are as the model's files say",
        ),
    ] = None
    mm_enable_dp_encoder: A[
        bool,
        option(
            "Have each rank encode a share of a step's images, and send the rows to the others.",
            note="pays where several images come at once; of one alone the others wait for it",
        ),
    ] = False
    mm_host_memory_gb: A[
        HostMemory,
        option(
            "GiB of host memory that decoded and prepared images, videos and sounds of all requests may "
            "take.",
            note="a file waits for room within its request's time, else it gets status 503",
        ),
    ] = 8.0
    limit_mm_data_per_request: A[
        Json | None,
        option(
            "Most images, videos and sounds of a request, as JSON: image, video and audio.",
            note="256 of each kind that it does not name",
        ),
    ] = None
    disable_fast_image_processor: A[
        bool,
        superseded(
            "Prepare images with the slow processor.",
            "Images are always prepared with the arithmetic of transformers' processors on Pillow.",
        ),
    ] = False
    keep_mm_feature_on_device: A[
        bool,
        superseded(
            "Leave encoded inputs on the device after use.",
            "What an encoder makes never leaves its device, and up to 256 MiB of it are kept.",
        ),
    ] = False
    enable_precise_embedding_interpolation: A[
        bool,
        superseded(
            "Interpolate position embeddings of images corner to corner.",
            "They always are where a model was trained so (Qwen3-VL), as in transformers.",
        ),
    ] = False
