"""Options of drafts that cannot go together: cases of test_checks.py."""

from typing import Any

# wrong values, part of the sentence, what mends them
DRAFT_CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (
        {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 7,
        },
        "it must be 4",
        {"speculative_num_draft_tokens": 4},
    ),
    (
        {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
        "is of draft models",
        {"speculative_num_steps": "auto"},
    ),
    (
        {"speculative_algorithm": "NGRAM", "speculative_ngram_min_bfs_breadth": 11},
        "is above --speculative-ngram-max-bfs-breadth 10",
        {"speculative_ngram_min_bfs_breadth": 10},
    ),
    (
        {"speculative_algorithm": "NGRAM", "enable_multi_layer_eagle": True},
        "take --speculative-algorithm NEXTN",
        {"speculative_algorithm": "NEXTN"},
    ),
    (
        {
            "speculative_algorithm": "EAGLE",
            "enable_multi_layer_eagle": True,
            "speculative_draft_model_path": "x",
        },
        "leave --speculative-draft-model-path out",
        {"speculative_draft_model_path": None},
    ),
    (
        {
            "speculative_algorithm": "NEXTN",
            "enable_multi_layer_eagle": True,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 8,
        },
        "makes chains",
        {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    ),
    ({"speculative_algorithm": "EAGLE3"}, "needs a draft model", {"speculative_draft_model_path": "x"}),
]
