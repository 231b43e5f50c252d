"""How long ranks wait for one another where they meet."""

from pathlib import Path

import pytest
import torch.distributed as dist

from runtime.devices import rendezvous
from runtime.devices.rendezvous import Absent, Rendezvous
from runtime.devices.torch_collectives import TorchCollectives, open_store


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 4)
    store.set("here/2", "")
    with pytest.raises(Absent, match="rank 1, 3 of 4 did not come within 0.2 s"):
        Rendezvous(store, 0, 4).meet(0.2)
    for rank in (1, 3):
        store.set(f"here/{rank}", "")
    Rendezvous(store, 0, 4).meet(0.2)


def test_a_rank_that_is_alone_does_not_wait_in_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous.Rendezvous.meet, "__defaults__", (0.2,))
    with pytest.raises(Absent, match="rank 1 of 2 did not come"):
        TorchCollectives("gloo", 0, 2, str(tmp_path / "store"))
    assert not dist.is_initialized()


def test_a_store_that_no_rank_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.devices import torch_collectives

    monkeypatch.setattr(torch_collectives, "MEET_TIMEOUT_S", 0.3)
    with pytest.raises(RuntimeError):
        open_store("tcp://127.0.0.1:9/prefix?fd=0", 1, 2)
