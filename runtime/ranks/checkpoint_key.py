"""The identity of a checkpoint's weights on one rank, by which what a device packed of them is found again
(devices/packed.py)."""

import os
import time
from hashlib import blake2b
from pathlib import Path

import msgspec

from runtime.messages.ranks import StartRank
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.weight_files import weight_files
from runtime.regular_file import open_regular

HEAD_BYTES = 1 << 20  # of a file that are read: the headers of all but the largest models' files
SETTLED_NS = (
    50_000_000  # a file that was changed later than this ago may change again at the same time of its clock
)
# fields of StartRank, apart from the config that is read with them, that decide what a rank's weights are
FIELDS = (
    "load_format",
    "tp_size",
    "pp_size",
    "attention_groups",
    "attention_parts",
    "replicates_dense",
    "has_group_heads",
    "ep_size",
    "moe_a2a_backend",
    "has_wide_head",
    "quantization",
)


def checkpoint_key(start: StartRank, rank: int, dtype: str, config: ModelConfig) -> str:
    """The key of this rank's weights: a function of the checkpoint's files, of the config and of the options
    that decide which part of them the rank has, and in what form. Files are known by size, times and number,
    as well as by how they begin; a file that is written to or replaced is another one.

    Empty: a file was changed just now, so that a further change could go unnoticed. Raises ModelError,
    OSError.
    """
    files = []
    for path in weight_files(Path(start.model_path), start.load_format):
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
            head = blake2b(file.read(HEAD_BYTES), digest_size=20).hexdigest()
        if abs(time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns)) < SETTLED_NS:
            return ""
        files.append(
            (path.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev, head)
        )
    options = [getattr(start, name) for name in FIELDS]
    spread = start.expert_places
    places = None if spread is None else (spread.num_copies, sorted(spread.layers.items()))
    known = (files, rank, dtype, options, places, config)
    return blake2b(msgspec.json.encode(known, order="deterministic"), digest_size=20).hexdigest()
