"""Slots that the host reads and writes itself: the same numbers and tokens as by operators of torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.devices.cpu.self_check import load_library
from runtime.layers.upload import PackedUpload
from runtime.messages.steps import Admit
from runtime.ranks.slots import Slots
from tests.devices.drive import Planner, sampling, start
from tests.models.make import make_checkpoint

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 0.8, "seed": 5},
    "filtered": {"temperature": 0.9, "top_p": 0.8, "top_k": 7, "min_p": 0.05, "seed": 6},
    "penalised": {"frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "read": {"temperature": 0.5, "seed": 7, "top_logprobs": 2},
}


def slots_of(num_pools: int) -> Slots:
    slots = Slots(5, 4, 100, torch.device("cpu"), num_pools)
    tables = torch.arange(slots.page_tables.numel(), dtype=torch.int32) * 7 % 19
    slots.page_tables.copy_(tables.view_as(slots.page_tables))
    slots.last_token.copy_(torch.arange(6) * 3)
    slots.open_host()
    return slots


@pytest.mark.parametrize("num_pools", [1, 2])
def test_locations_are_those_of_the_page_tables(num_pools: int) -> None:
    slots = slots_of(num_pools)
    assert slots.host is not None
    rows, positions = np.array([4, 0, 2], np.int32), np.array([0, 9, 15], np.int64)
    found = slots.host.locations(rows, positions, 4)
    assert len(found) == num_pools
    for table, places in zip(slots.page_tables, found, strict=True):
        expected = [int(table[r, p // 4]) * 4 + int(p) % 4 for r, p in zip(rows, positions, strict=True)]
        assert places.dtype == torch.int64 and places.tolist() == expected


def test_tensors_and_arrays_are_the_same_memory() -> None:
    slots = slots_of(1)
    assert slots.host is not None
    rows = np.array([3, 1], np.int32)
    before = slots.host.last_tokens(rows)
    slots.host.set_last_tokens(rows, torch.tensor([50, 60]))
    assert slots.last_token.tolist() == [0, 60, 6, 50, 12, 15] and before.tolist() == [9, 3]
    admits = [
        Admit(
            slot, sampling(temperature=0.5 + slot, top_p=0.9, top_k=slot, min_p=0.1), 0, np.empty(0, np.int32)
        )
        for slot in (1, 3)
    ]
    slots._admit(admits, upload := PackedUpload(slots.torch_device))
    upload.send()
    temperature, top_p, min_p, top_k = slots.host.sampling(rows)
    assert temperature.tolist() == [3.5, 1.5] and top_k.tolist() == [3, 1]
    torch.testing.assert_close(top_p, torch.full((2,), 0.9))
    torch.testing.assert_close(min_p, torch.full((2,), 0.1))


@pytest.mark.skipif(load_library() is None, reason="no kernels are built")
def test_tokens_are_those_of_slots_that_torch_reads(tmp_path: Path) -> None:
    """Alone and in company, whatever the rows ask for; also when a slot that was read is another's."""
    model = make_checkpoint("llama", tmp_path)
    made: list[list[list[int]]] = []
    for uses_host in (True, False):
        executor, ready = start(model, max_total_tokens=1024)
        slots = executor.runner.slots  # type: ignore[attr-defined]
        assert slots.host is not None
        if not uses_host:
            slots.host = None
        planner = Planner(executor, ready, 4)
        made.append(
            [
                planner.generate(planner.row(0, [5, 9, 100, 7], sampling(**one)), 12)
                for one in SAMPLINGS.values()
            ]
            + [planner.generate(planner.row(0, [5, 9], sampling()), 6)]
        )
    assert made[0] == made[1]
