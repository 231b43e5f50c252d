"""Files of --init-expert-location."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime.errors import ModelError
from runtime.models.config.expert_location import ExpertLocation, read_expert_location

LAYERS = (True, False, True)  # four experts in the first and the last


def read(path: Path, content: Any, num_places: int = 4) -> ExpertLocation:
    path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    return read_expert_location(str(path), LAYERS, 4, num_places)


def test_what_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "experts.json"
    placements = [[3, 2, 1, 0, 1], [], [0, 1, 2, 3, 3]]
    assert read(file, {"physical_to_logical_map": placements}, 5).placements == placements
    counts = [[1.0, 2, 3, 4], [0, 0, 0, 0], [5, 0, 0, 1]]
    assert read(file, {"logical_count": counts}).loads == counts
    assert read(file, {"logical_count": [counts, counts]}).loads == (2 * np.array(counts)).tolist()


def test_a_record(tmp_path: Path) -> None:
    """As /dump_expert_distribution_record writes it."""
    file, counts = tmp_path / "record.safetensors", np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    save_file({"logical_count": counts, "step": np.arange(2)}, file)
    assert read_expert_location(str(file), LAYERS, 4, 6).loads == counts.sum(0).tolist()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\x80\x04pickle", "cannot be read"),
        ({}, "neither"),
        ({"physical_to_logical_map": [[0, 1, 2, 3]]}, "not for 3 layers with 4 places"),
        ({"physical_to_logical_map": [[0, 1, 2]] * 3}, "not for 3 layers with 4 places"),
        ({"physical_to_logical_map": [[0, 1, 2, 2]] * 3}, "a place for each of the 4 experts"),
        ({"physical_to_logical_map": [[0, 1, 2, 9]] * 3}, "a place for each of the 4 experts"),
        ({"logical_count": [[1, 2, 3]] * 3}, "4 experts each"),
        ({"logical_count": [[1, 2, 3, -4]] * 3}, "no numbers of tokens"),
        ({"logical_count": [[1, 2, 3, 4], [], [1, 2, 3, 4]]}, "different lengths"),
    ],
)
def test_what_is_refused(content: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=what):
        read(tmp_path / "experts.json", content)


def test_a_broken_record(tmp_path: Path) -> None:
    file = tmp_path / "record.safetensors"
    file.write_bytes(b"no safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        read_expert_location(str(file), LAYERS, 4, 4)
