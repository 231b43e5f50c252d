"""Adapters of a device with memory of its own: they are copied from pinned memory, and no copy is waited
for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.messages.lora import AdapterSetup
from tests.devices.drive import start
from tests.models.make import make_checkpoint
from tests.models.make_adapter import ALL, make_adapter
from tests.ranks.lora_slots import assigned


def test_copies_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=1)
    adapter = make_adapter(folder, tmp_path / "adapter", seed=1, targets=ALL)
    setup = AdapterSetup(num_lora_slots=2, max_rank=6, targets=ALL, loaded=[])
    executor: Any
    executor, _ = start(folder, adapters=setup)
    adapters, taken, pinned = executor.runner.adapters, [], {}

    def pin(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        pinned[copy.data_ptr()] = copy
        assert taken, "the thread has no device yet"
        return copy

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    adapters.torch_device = torch.device("cuda")
    adapters.take_device = lambda: taken.append(True)
    adapters.load(1, str(adapter))
    pairs = [tensor for pair in adapters.host_weights[1].values() for tensor in pair]
    assert len(pairs) == 14 and all(tensor.data_ptr() in pinned for tensor in pairs)
    copy, copied = Tensor.copy_, []

    def recorded(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if source.data_ptr() in pinned:
            copied.append(non_blocking)
        return copy(target, source)

    monkeypatch.setattr(Tensor, "copy_", recorded)
    with torch.inference_mode():
        adapters._assign(0, assigned(s1=1))
    assert copied == [True] * 14
    slots = adapters.lora_slots["layers.0.self_attn.o_proj"]
    a, b = adapters.host_weights[1]["layers.0.self_attn.o_proj", ""]
    assert torch.equal(slots.weights.a[1, 0, : len(a)], a) and torch.equal(slots.weights.b[1, :, : len(a)], b)
