"""Options of images, videos and sounds that cannot go together: cases of test_checks.py."""

from typing import Any

# wrong values, part of the sentence, what mends them
MEDIA_CASES: tuple[tuple[dict[str, Any], str, dict[str, Any]], ...] = (
    ({"limit_mm_data_per_request": {"smell": 1}}, "not smell", {"limit_mm_data_per_request": {"image": 1}}),
    ({"limit_mm_data_per_request": {"image": -1}}, "0 or more", {"limit_mm_data_per_request": {"image": 0}}),
    (
        {"mm_process_config": {"image": {"size": 1}, "audio": {}}},
        "audio, image.size is no setting; of image it takes min_pixels, max_pixels",
        {"mm_process_config": {"video": {"fps": 1.5, "max_frames": 8}}},
    ),
    (
        {"mm_process_config": {"video": {"num_frames": 0.5}}},
        "video.num_frames must be a number",
        {"mm_process_config": {"video": {"num_frames": 4}}},
    ),
    (
        {"mm_process_config": {"image": {"max_pixels": 1.5}}},
        "image.max_pixels must be a number",
        {"mm_process_config": {"image": {"max_pixels": 4096}}},
    ),
    ({"mm_process_config": {"image": 3}}, "image must be an object", {"mm_process_config": {"image": {}}}),
    (
        {"allowed_local_media_path": "pictures"},
        "requires the absolute path",
        {"allowed_local_media_path": "/tmp"},
    ),
)
