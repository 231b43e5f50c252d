"""Adapters' files are read as they are, and leave nothing behind."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.layers.lora import read_tensors


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_every_type_is_read(tmp_path: Path) -> None:
    wanted = {
        str(dtype): torch.arange(-6, 6).view(3, 4).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    save_file(wanted, tmp_path / "a.safetensors")
    found = read_tensors(tmp_path / "a.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_adapters_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    """60 bytes for each tensor would be 5 MB here."""
    path = tmp_path / "a.safetensors"
    save_file({f"t{i}": torch.zeros(8, 16) for i in range(56)}, path)
    for _ in range(200):
        read_tensors(path)
    before = resident_bytes()
    for _ in range(1500):
        read_tensors(path)
    assert resident_bytes() - before < 2 << 20
