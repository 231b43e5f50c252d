"""Norms that sum what ranks have parts of: in processes that share memory by files, and by doubles."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.cuda import collectives
from runtime.devices.cuda.collectives import NcclCollectives
from runtime.devices.cuda.device import open_norm_sums
from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.norm_sums import MOST_RANKS, ROWS, NormSums
from runtime.devices.cuda.ops import CudaOps
from runtime.devices.cuda.options import CudaOptions
from runtime.devices.cuda.symmetric_memory import SymmetricSums
from runtime.devices.operands import NormInputs
from runtime.devices.single_rank import SingleRank
from runtime.models.config.quantization_schemes import Fp8
from tests.devices.cpu.conftest import run_ranks as run_ranks
from tests.devices.cpu.ranks import RunRanks
from tests.devices.cuda.test_fusion import packed
from tests.devices.cuda.test_gemm import HERE
from tests.devices.cuda.torch_device import HAS_GPU
from tests.models.make import make_checkpoint

pytestmark = pytest.mark.skipif(HAS_GPU, reason="ranks of the interpreter")
SIZE = 2


def rank_of(rank: int, folder: Path, failed: Any) -> None:
    """One of SIZE ranks: sums and norms rows of changing numbers, as one rank would, to the bit."""
    from tests.devices.cuda.summing import open_sums

    torch.set_num_threads(1)
    sums = open_sums(folder, rank, SIZE)
    sums.check()
    generator = torch.Generator().manual_seed(1)
    ops, weight = CudaFusedOps(CudaOps(torch.bfloat16, HERE), sums), packed(Fp8(), 16, 256)
    for rows in (1, 3, 2):
        # multiples of 1/8 whose sums bfloat16 holds exactly
        parts = [torch.randint(-8, 8, (rows, 256), generator=generator).bfloat16() / 8 for _ in range(SIZE)]
        residual = torch.randn(rows, 256, generator=generator).bfloat16()
        norm = torch.randn(256, generator=generator).bfloat16()
        summed = torch.stack(parts).sum(0)
        wanted, total = ops.add_rms_norm(summed, residual.clone(), norm, 1e-5, weight)
        codes = ops.ops.prepared.take(wanted, weight) if ops.ops.prepared is not None else None
        found = ops.add_rms_norm_of_ranks(NormInputs(parts[rank], residual, norm, 1e-5), weight)
        assert found is not None and ops.ops.prepared is not None
        own = ops.ops.prepared.take(found[0], weight)
        same = torch.equal(found[0], wanted) and torch.equal(found[1], total)
        assert codes is not None and own is not None
        if not (same and torch.equal(own.values, codes.values)):
            failed.put(f"rank {rank}, {rows} rows")
    tried = 2 * 3  # of the check: two rows of each dtype, twice
    if sums.turns[:4].tolist() != [tried + 3, tried + 2, 1, 0]:
        failed.put(f"turns {sums.turns[:4].tolist()}")


def test_ranks_sum_in_their_norms(tmp_path: Path) -> None:
    """Rows have turns of their own: steps have different numbers of them."""
    context = multiprocessing.get_context("spawn")
    failed = context.Queue()
    ranks = [context.Process(target=rank_of, args=(i, tmp_path, failed)) for i in range(SIZE)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(300)
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        one.kill()
    assert codes == [0] * SIZE and failed.empty(), "what a rank said is above"


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_hidden_layers": 2}),
    ("llama", {"num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True}),  # products sum
    ("deepseek_v3", {"num_hidden_layers": 2}),  # a dense layer, and one with experts
]


def test_models_whose_norms_sum(tmp_path: Path, run_ranks: RunRanks) -> None:
    """Two ranks give the tokens of one; longer steps are summed before."""
    folders = [
        make_checkpoint(family, tmp_path / str(i), **overrides)
        for i, (family, overrides) in enumerate(MODELS)
    ]
    (alone,) = run_ranks(1, folders, tmp_path)
    first, second = run_ranks(2, folders, tmp_path, 1, "summing")
    for one, zero, other in zip(alone, first, second, strict=True):
        assert zero["tokens"] == one["tokens"] and zero["last"] == other["last"] == one["last"]
        assert zero["logprobs"] == pytest.approx(one["logprobs"], abs=2e-3)
    # of 19 steps three norms of two layers: the first one is given embeddings
    calls = [path.read_text().split() for path in sorted(tmp_path.glob("* memory/calls of *"))]
    assert [len(lines) for lines in calls] == [19 * 3] * 4
    assert {"1", "3"} <= set(calls[0]) and max(map(int, calls[0])) > 8, "few rows, and a prompt"


def inputs(rows: int = 2, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> NormInputs:
    x = torch.zeros(rows, size, dtype=dtype)
    return NormInputs(x, x.clone(), torch.ones(size, dtype=dtype), 1e-5)


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        pytest.param(inputs(), True, id="few rows"),
        pytest.param(inputs(0), False, id="none"),
        pytest.param(inputs(ROWS + 1), False, id="many"),
        pytest.param(inputs(2, 60), False, id="rows of no multiple of 16 bytes"),
        pytest.param(inputs(ROWS, 4096), False, id="more bytes than one shot"),
        pytest.param(inputs(1, 16384, torch.float32), False, id="a row too long"),
        pytest.param(inputs(dtype=torch.float64), False, id="another dtype"),
    ],
)
def test_which_sums_norms_make(given: NormInputs, is_taken: bool) -> None:
    sums = NormSums(torch.zeros(1, dtype=torch.uint8), [0, 0], 0)
    assert sums.takes(given) is is_taken
    ops = CudaFusedOps(CudaOps(torch.bfloat16, HERE), sums)
    assert ops.sums_ranks and (is_taken or ops.add_rms_norm_of_ranks(given, None) is None)
    assert not CudaFusedOps(CudaOps(torch.bfloat16, HERE)).sums_ranks


FAULT = "no access from GPU 0 to GPU 1"


class Sums:
    """NormSums of one rank, whose check says `fault`."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def check(self) -> None:
        if self.fault:
            raise RuntimeError(self.fault)


@pytest.mark.parametrize(
    ("own", "others", "reason"),
    [
        (Sums(""), [[], []], ""),
        (Sums("a norm of a sum was wrong"), [[], []], "a norm of a sum was wrong"),
        (Sums(""), [[FAULT]], FAULT),
        (None, [[]], FAULT),
    ],
    ids=["all can", "its own is wrong", "another cannot", "it cannot"],
)
def test_norms_that_cannot_sum_are_left_out_by_all_ranks(
    own: Sums | None, others: list[list[str]], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a line in the log; every rank reports equally often."""

    def opened(*_: Any) -> Sums:
        if own is None:
            raise RuntimeError(FAULT)
        return own

    logged: list[str] = []
    monkeypatch.setattr(NormSums, "open", opened)
    monkeypatch.setattr(collectives.log, "get", lambda name: Log(logged))
    ranks = NcclCollectives.__new__(NcclCollectives)
    ranks.rank, ranks.size, answers = 0, 3, iter(others)
    ranks.sums = SymmetricSums(Tensor(), "all", 3, None)  # type: ignore[arg-type]
    monkeypatch.setattr(ranks, "outcomes", lambda mine: [mine, *next(answers)])
    found = ranks.open_norm_sums(torch.device("cpu"))
    assert (found is None) is bool(reason) and list(answers) == [] and logged == [reason] * bool(reason)
    ranks.sums = None  # without shared memory nothing is tried
    assert ranks.open_norm_sums(torch.device("cpu")) is None


class Log:
    def __init__(self, logged: list[str]) -> None:
        self.logged = logged

    def warning(self, event: str, reason: str) -> None:
        self.logged.append(reason)


def test_which_ranks_open_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that share memory, with all kernels joined."""
    ranks = NcclCollectives.__new__(NcclCollectives)
    marker: Any = object()
    monkeypatch.setattr(ranks, "open_norm_sums", lambda device: marker)
    device = torch.device("cpu")
    assert open_norm_sums(ranks, device, CudaOptions(kernel_fusion="all")) is marker
    assert open_norm_sums(ranks, device, CudaOptions(kernel_fusion="safe")) is None
    assert open_norm_sums(SingleRank(), device, CudaOptions(kernel_fusion="all")) is None
    with pytest.raises(RuntimeError, match=f"{MOST_RANKS + 1} ranks"):
        NormSums.open("all", 0, MOST_RANKS + 1, device)
