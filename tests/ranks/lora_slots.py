"""Sequences with adapters and one without, decoded together: each gets the tokens of the model with its
adapter merged, in every LoRA slot."""

from pathlib import Path
from typing import Any

import numpy as np

from runtime.devices.executor import Executor
from runtime.messages.lora import AdapterSetup, LoadAdapter, LoraAssignment
from runtime.models.config.lora_targets import lora_modules
from runtime.models.config.model_config import read_config
from tests.devices.drive import Planner, Row, sampling, start
from tests.models.make_adapter import ALL, make_adapter, merge
from tests.models.reference import Reference

PROMPT = [5, 9, 100, 7]


def assigned(**adapters: int) -> LoraAssignment:
    """Adapter ids by LoRA slot, as `s0=2`."""
    pairs = [
        np.array(column, np.int32)
        for column in ([int(slot[1:]) for slot in adapters], list(adapters.values()))
    ]
    return LoraAssignment(*pairs, np.empty(0, np.int32))


def leaves(folder: Path) -> tuple[str, ...]:
    """Last names of all modules that adapters of a checkpoint may change."""
    return tuple({name.rpartition(".")[2] for name in lora_modules(read_config(folder))})


def decode_with_adapters(
    folder: Path,
    index: Path,
    num_steps: int,
    page_size: int = 4,
    targets: tuple[str, ...] = ALL,
    **options: Any,
) -> Executor:
    """Decodes with adapters 1 and 2, of all `targets` and of every second one, then with their slots swapped;
    one row of each turn has no adapter."""
    references, loads = [Reference(folder)], []
    for id in (1, 2):
        adapter = make_adapter(folder, index / f"{id}", seed=id, targets=targets[::id])
        references.append(Reference(merge(folder, adapter, index / f"{id}-merged", {"": 2.0})))
        loads.append(LoadAdapter(id, str(adapter)))
    setup = AdapterSetup(num_lora_slots=2, max_rank=6, targets=leaves(folder), loaded=loads)
    executor, ready = start(
        folder,
        page_size=page_size,
        max_len=64,
        max_total_tokens=64 * page_size,
        adapters=setup,
        num_states=12,
        **options,
    )
    for size in options.get("graph_sizes", []):
        assert executor.capture(size).error == ""
    planner, done = Planner(executor, ready, page_size), []

    def admit(slot: int, lora_slot: int, adapter: int) -> Row:
        row = planner.row(slot, PROMPT, sampling())
        row.lora_slot = lora_slot
        done.append((row, adapter))
        return row

    for turn, (first, second) in enumerate(((1, 2), (2, 1))):
        planner.lora_assignment = assigned(s0=first, s1=second)
        rows = [admit(4 * turn, 0, first), admit(4 * turn + 1, -1, 0), admit(4 * turn + 2, 1, second)]
        planner.run([], [(row, len(PROMPT)) for row in rows])
        for batch in (rows, rows[1:2], rows[1:]):
            for _ in range(num_steps):
                planner.run(batch, [])
    for row, adapter in done:
        assert row.tokens[len(PROMPT) :] == references[adapter].greedy(
            PROMPT, len(row.tokens) - len(PROMPT)
        ), (row.slot, adapter)
    return executor
