"""What preparing a small picture costs: CPU time of the processes that do it and wall time, next to doing it
in a thread."""

import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from runtime.media_kind import MediaKind
from runtime.messages.media import Media
from runtime.models.config.model_config import read_config
from runtime.preparation.preparer import Preparer
from runtime.text.open_media import open_processor
from runtime.text.vocabulary import Vocabulary

SIDE = 256  # pixels


def preparation(folder: Path, num_files: int) -> dict[str, Any]:
    """Milliseconds a picture of SIDE x SIDE pixels, prepared one after the other."""
    config, vocabulary = read_config(folder), Vocabulary.load(folder)
    here = open_processor(folder, config.media, vocabulary)
    assert here is not None and config.media is not None
    values = np.random.default_rng(0).integers(0, 256, (1, SIDE, SIDE, 3), dtype=np.uint8)
    file = Media(kind=MediaKind.IMAGE, param="image", digest=bytes(32), values=values)
    there = Preparer(here, folder, config.media, vocabulary, {}, dict(os.environ))
    try:
        for _ in range(5):
            there.prepare(file)
        assert there._process is not None
        pid = there._process.pid
        begin_ms, walls = tree_ms(pid), []
        for _ in range(num_files):
            begin = time.perf_counter()
            there.prepare(file)
            walls.append((time.perf_counter() - begin) * 1e3)
        elsewhere_ms = tree_ms(pid) - begin_ms
    finally:
        there.close()
    begin = time.thread_time()
    for _ in range(num_files):
        here.prepare(file)
    return {
        "processes_cpu_ms": round(elsewhere_ms / num_files, 2),
        "wall_ms": round(median(walls), 2),
        "wall_p90_ms": round(sorted(walls)[num_files * 9 // 10], 2),
        "in_a_thread_cpu_ms": round((time.thread_time() - begin) * 1e3 / num_files, 2),
    }


def tree_ms(pid: int) -> float:
    """CPU time of a process and of the children that it has now, which leaves out those that have ended."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    each = [Path(f"/proc/{one}/schedstat").read_text().split()[0] for one in (pid, *children)]
    return sum(map(int, each)) / 1e6
