"""--init-expert-location: a file with the placements of experts, or with counts of their tokens, from which
placements follow. Torch-free.

    JSON          {"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], ...]}   the expert of each place, by layer
                  {"logical_count": [[12, 3, 0, 40], ...]}                 tokens of each expert, by layer
    safetensors   logical_count [steps, layers, experts], as /dump_expert_distribution_record writes it

Layers are all of the model's, those without experts included.
"""

from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.numpy import load

from runtime.errors import ModelError
from runtime.regular_file import read_regular

OPTION = "--init-expert-location"


class ExpertLocation(Struct, frozen=True):
    """What a file says: one of both."""

    placements: list[list[int]] | None = None  # of each layer, the expert of each place
    loads: list[list[float]] | None = None  # of each layer, the tokens of each expert


class _File(Struct, frozen=True):
    physical_to_logical_map: list[list[int]] | None = None
    logical_count: list[list[float | list[float]]] | None = None  # by layer, or by step and layer


def read_expert_location(
    path: str, layers: tuple[bool, ...], num_experts: int, num_places: int
) -> ExpertLocation:
    """Reads a file for a model whose layers have `num_experts` experts where `layers` is True. Raises
    ModelError for a file of another form, or of another model."""
    found = _read(path)
    given, width, what = found.placements, num_places, "places (experts and --ep-num-redundant-experts)"
    if given is None:
        given, width, what = found.loads, num_experts, "experts"  # type: ignore[assignment]
    if given is None:
        raise ModelError(
            f"{OPTION} {path} has neither physical_to_logical_map nor logical_count; give one of them"
        )
    if len(given) != len(layers) or any(
        len(row) != width for row, is_sparse in zip(given, layers, strict=True) if is_sparse
    ):
        raise ModelError(
            f"{OPTION} {path} is not for {len(layers)} layers with {width} {what} each; make it for this "
            "model and these options"
        )
    for row, is_sparse in zip(given, layers, strict=True):
        if not is_sparse:
            continue
        if found.placements is not None and set(row) != set(range(num_experts)):
            raise ModelError(
                f"{OPTION} {path}: a layer does not have a place for each of the {num_experts} experts"
            )
        if not np.isfinite(row).all() or min(row) < 0:
            raise ModelError(f"{OPTION} {path} has counts that are no numbers of tokens")
    return found


def _read(path: str) -> ExpertLocation:
    try:
        raw = read_regular(Path(path))
        if path.endswith(".safetensors"):
            counts = load(raw)["logical_count"].sum(0)
            return ExpertLocation(loads=counts.astype(np.float64).tolist())
        file = msgspec.json.decode(raw, type=_File)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, SafetensorError, KeyError) as error:
        raise ModelError(
            f"{OPTION} {path} cannot be read ({error}); give trivial, a JSON file, or a record that "
            "/dump_expert_distribution_record wrote"
        ) from None
    if file.logical_count is None:
        return ExpertLocation(file.physical_to_logical_map)
    try:
        counts = np.asarray(file.logical_count, np.float64)
    except ValueError:
        raise ModelError(f"{OPTION} {path} has a logical_count with rows of different lengths") from None
    return ExpertLocation(
        file.physical_to_logical_map, (counts.sum(0) if counts.ndim == 3 else counts).tolist()
    )
