"""Copies between an NPU's pages and host memory, by themselves; with a whole server in test_serve.py."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from runtime.devices.host_memory import LAYOUTS, HostPages
from runtime.errors import StartError

pytestmark = [pytest.mark.ascend, pytest.mark.lenient]

PAGE, PAGES, HOSTS = 16, 6, 5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_batched", [False, True], ids=["staged", "batched"])
def test_pages_go_and_come_back(layout: str, dtype: torch.dtype, is_batched: bool) -> None:
    import torch_npu

    assert torch_npu
    from runtime.devices.ascend.page_copies import AscendPageCopier

    kv: Any = [  # of one layer with index keys besides
        tuple(torch.randn(PAGES * PAGE, 2, dim, dtype=dtype, device="npu") for dim in dims)
        for dims in ((8, 4), (8, 4, 6), (8, 4))
    ]
    parts = tuple(cache[:PAGE].nbytes for pair in kv for cache in pair)
    fd = os.memfd_create("host-test")
    os.ftruncate(fd, HOSTS * sum(parts))
    host = HostPages(fd, HOSTS, parts, layout)
    os.close(fd)
    copies = AscendPageCopier(kv, host, PAGE, is_batched=is_batched)
    before = [[cache.view(PAGES, -1).cpu() for cache in pair] for pair in kv]
    copies.save(np.array([4, 1, 2], np.int32), np.array([0, 3, 1], np.int32))
    for pair in kv:
        for cache in pair:
            cache.zero_()
    arrivals = copies.load(np.array([3, 0], np.int32), np.array([5, 2], np.int32))
    for layer, (pair, old) in enumerate(zip(kv, before, strict=True)):
        arrivals.wait(layer)
        for cache, was in zip(pair, old, strict=True):
            now = cache.view(PAGES, -1).cpu()
            assert torch.equal(now[5], was[1]) and torch.equal(now[2], was[4]) and not now[[0, 1, 3, 4]].any()
    copies.finish(is_alone=False)
    reported: list[int] = []
    copies.save_layers(range(1), np.array([5], np.int32), np.array([4], np.int32), lambda: reported.append(1))
    copies.save_layers(range(1, 3), np.array([5], np.int32), np.array([4], np.int32), None)
    copies.finish(is_alone=False)
    own = [cache.view(PAGES, -1)[5].cpu().view(torch.uint8) for pair in kv for cache in pair]
    assert reported == [1]
    assert [host.part(i)[4].tobytes() for i in range(len(parts))] == [each.numpy().tobytes() for each in own]
    for pages, hosts in (([PAGES], [0]), ([0], [HOSTS]), ([-1], [0])):
        with pytest.raises(IndexError, match="there is no"):
            copies.save(np.array(pages, np.int32), np.array(hosts, np.int32))
    copies.close()


def test_host_memory_that_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_npu

    from runtime.devices.ascend.page_copies import register

    fd = os.memfd_create("host-test")
    os.ftruncate(fd, 4096)
    host = HostPages(fd, 1, (4096,), "page_first")
    os.close(fd)
    monkeypatch.setattr(torch_npu._C._npurt, "npuHostRegister", lambda at, size, flags: 207000)
    with pytest.raises(StartError, match="does not register .*error 207000.*take --hicache-io-backend"):
        register(host)
