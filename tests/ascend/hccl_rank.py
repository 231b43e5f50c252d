"""One of the processes of test_simulator.py: `hccl_rank.py RANK SIZE STORE_FILE`."""

import os
import sys

import torch
import torch.distributed as dist
import torch_npu

assert torch_npu  # brings the backend


def main(rank: int, size: int, store: str) -> None:
    """Runs one rank."""
    torch.npu.set_device(rank)
    os.environ["HCCL_WHITELIST_DISABLE"] = "1"
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    weight, x = torch.randn(64, 32), torch.randn(4, 32)
    part = slice(rank * 32 // size, (rank + 1) * 32 // size)
    a, b = x[:, part].npu(), weight[:, part].t().npu()
    y = a @ b
    dist.all_reduce(y)
    torch.testing.assert_close(y.cpu(), x @ weight.t(), atol=1e-4, rtol=0)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        z = a @ b
        dist.all_reduce(z)
        z = z + 1
    a.mul_(2)
    graph.replay()
    torch.testing.assert_close(z.cpu(), 2 * (x @ weight.t()) + 1, atol=1e-4, rtol=0)
    sizes = [other + 1 for other in range(size)]
    got = torch.empty(size * (rank + 1), device="npu")
    dist.all_to_all_single(
        got, torch.arange(sum(sizes), device="npu").float() + 100 * rank, [rank + 1] * size, sizes
    )
    mine = torch.arange(sum(sizes)).float()[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    assert torch.equal(got.cpu(), torch.cat([mine + 100 * other for other in range(size)]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
