"""Other packages' latent attention behind --attention-backend against the definition in float64, over pages
in which a token's latent and rotary part stand one behind the other."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.devices.attention_backends import BACKENDS
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.attention_backends import open_hybrid_backend
from runtime.devices.cuda.kernels.launch import INTERPRETER, gpu_of
from runtime.devices.cuda.mla import UpProjection
from runtime.devices.cuda.ops import CudaOps
from runtime.errors import StartError
from tests.devices.cuda import latent_doubles
from tests.devices.cuda.test_attention import Rows, by_the_book
from tests.devices.cuda.torch_device import HAS_GPU, TORCH_DEVICE, near

BF16, RANK, ROPE, NOPE, VALUE, HEADS, PAGE = torch.bfloat16, 512, 64, 24, 16, 4, 64
MODULES = {"flashmla": "flash_mla", "trtllm_mla": "flashinfer"}
CAPABILITIES = {"flashmla": (9, 0), "trtllm_mla": (10, 0)}
NAMES = tuple(MODULES)
SCALE = (NOPE + ROPE) ** -0.5


@pytest.fixture(autouse=True)
def packages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles hold calls to the sources; on a GPU with the package, it is the package."""
    if not HAS_GPU:
        latent_doubles.install(monkeypatch)
        return
    name = request.node.callspec.params["name"] if hasattr(request.node, "callspec") else NAMES[0]
    if find_spec(MODULES[name]) is None or torch.cuda.get_device_capability()[0] not in BACKENDS[name].majors:
        pytest.skip(f"{name} is not installed here, or not for this GPU")


def ops_of(prefill: str, decode: str) -> CudaOps:
    """Ops with these backends."""
    gpu = gpu_of(TORCH_DEVICE) if HAS_GPU else INTERPRETER
    capability = CAPABILITIES[prefill if decode == "triton" else decode]
    return CudaOps(BF16, gpu, attention_backend=open_hybrid_backend(prefill, decode, BF16, gpu, capability))


class Latents:
    """Pages of some rows, and what the definition says of them."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.starts, self.counts = np.array(rows, np.int32).T
        most = -(-max(start + count for start, count in rows) // PAGE)
        table = np.random.default_rng(0).permutation(most * len(rows)).reshape(len(rows), most) + 1
        self.table = torch.from_numpy(table).int().unsqueeze(0).to(TORCH_DEVICE)
        whole = torch.full(((table.size + 1) * PAGE, 1, RANK + ROPE), float("nan"), dtype=BF16)
        whole[:PAGE] = 0  # the padding page
        generator = torch.Generator().manual_seed(1)
        self.known = []
        for index, (start, count) in enumerate(rows):
            at = torch.arange(start + count)
            tokens = torch.randn(len(at), 1, RANK + ROPE, generator=generator).to(BF16)
            whole[self.table[0, index].cpu().long()[at // PAGE] * PAGE + at % PAGE] = tokens
            self.known.append(tokens)
        self.latents, self.ropes = whole.to(TORCH_DEVICE).split((RANK, ROPE), 2)
        num = int(self.counts.sum())
        self.q, self.q_rope = (
            torch.randn(num, HEADS, dim, generator=generator).to(BF16).to(TORCH_DEVICE)
            for dim in (NOPE, ROPE)
        )
        up = torch.randn(HEADS, NOPE + VALUE, RANK, generator=generator).to(BF16) / RANK**0.5
        self.up = UpProjection(
            up[:, :NOPE].contiguous().to(TORCH_DEVICE),
            up[:, NOPE:].transpose(1, 2).contiguous().to(TORCH_DEVICE),
        )

    def expected(self) -> Tensor:
        """Float64, over keys and values of all heads."""
        keys, values = (x.double().cpu() for x in (self.up.keys, self.up.values))
        found, first = [], 0
        for (start, count), tokens in zip(self.rows, self.known, strict=True):
            latents, ropes = tokens.double().split((RANK, ROPE), 2)
            k = torch.einsum("tr,hnr->thn", latents.squeeze(1), keys)
            k = torch.cat((k, ropes.expand(-1, HEADS, -1)), 2)
            v = torch.einsum("tr,hrv->thv", latents.squeeze(1), values)
            q = torch.cat((self.q, self.q_rope), 2)[first : first + count]
            found.append(by_the_book(q, k, v, start, Scores(SCALE)))
            first += count
        return torch.cat(found)


PHASES = [("flashmla", phases) for phases in ("both", "prefill", "decode")] + [("trtllm_mla", "decode")]


@pytest.mark.parametrize(("name", "phases"), PHASES)
def test_rows(name: str, phases: str) -> None:
    """Decodes, rows that verify as many drafts, a chunk of its own length, and one that is expanded."""
    ops = ops_of(name if phases != "decode" else "triton", name if phases != "prefill" else "triton")
    case = Latents([(70, 1), (3, 1), (130, 1), (9, 4), (61, 4), (0, 9), (64, 24)])
    rows = AttentionRows(3, np.arange(7, dtype=np.int32), case.starts, case.counts)
    plan = ops.plan_attention(rows, case.table, PAGE, (0,))
    for _ in range(2):  # the layers of a step share a schedule
        found = ops.latent_attention(case.q, case.q_rope, case.latents, case.ropes, case.up, plan, SCALE)
    near(found, case.expected(), BF16)
    assert not case.up.absorbs(24) and case.up.absorbs(9)


@pytest.mark.parametrize("name", NAMES)
def test_captured_decodes(name: str) -> None:
    """A body that has seen padding alone computes rows of any length: it reads them on the device."""
    ops, case = ops_of("triton", name), Latents([(70, 1), (0, 1), (190, 1)])
    table = torch.cat((case.table, torch.zeros_like(case.table[:, :1])), 1)  # a slot of padding
    slots, lengths = (
        torch.full((3,), 3, device=TORCH_DEVICE),
        torch.ones(3, dtype=torch.int64, device=TORCH_DEVICE),
    )
    assert ops.attention_backend is not None

    def body() -> Tensor:
        assert ops.attention_backend is not None
        plan = ops.attention_backend.plan_decodes(slots, lengths, table, PAGE, (0,))
        return ops.latent_attention(case.q, case.q_rope, case.latents, case.ropes, case.up, plan, SCALE)

    body()
    slots.copy_(torch.arange(3))
    lengths.copy_(torch.tensor([start + 1 for start, _ in case.rows]))
    near(body(), case.expected(), BF16)


def test_separate_caches_are_refused() -> None:
    """A cache whose parts are apart is no page of such a kernel."""
    ops, case = ops_of("flashmla", "flashmla"), Latents([(5, 1)])
    plan = ops.plan_attention(
        AttentionRows(1, np.zeros(1, np.int32), case.starts, case.counts), case.table, PAGE, (0,)
    )
    apart = case.latents.contiguous(), case.ropes.contiguous()
    with pytest.raises(AssertionError):
        ops.latent_attention(case.q, case.q_rope, *apart, case.up, plan, SCALE)


@pytest.mark.skipif(HAS_GPU, reason="packages may be there")
@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [one for one in sys.modules if one.split(".")[0] in MODULES.values()]:
        monkeypatch.setitem(sys.modules, module, None)
    needs = f"--attention-backend {name} needs"
    with pytest.raises(StartError, match=f"{needs} the package {BACKENDS[name].package} .*install it as"):
        open_hybrid_backend("triton", name, BF16, INTERPRETER, CAPABILITIES[name])
    with pytest.raises(StartError, match=f"{needs} a GPU of compute capability"):
        open_hybrid_backend("triton", name, BF16, INTERPRETER, (8, 0))
    with pytest.raises(StartError, match="computes in bfloat16"):
        open_hybrid_backend("triton", name, torch.float32, INTERPRETER, CAPABILITIES[name])
