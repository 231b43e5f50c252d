"""What derivations may know besides the options: facts about the model, the device and the machine. Data, no
hooks."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from runtime.errors import OptionsError
from runtime.models.mla_config import Latent
from runtime.models.moe_config import MoeConfig
from runtime.models.pooling import Pooling
from runtime.models.quantization_config import Quantization
from runtime.models.quantization_schemes import SCHEMES
from runtime.options.compat.environment import RANK_VARIABLES


class ModelFacts(Protocol):
    """The part of runtime.models.config.ModelConfig that options depend on."""

    @property
    def context_len(self) -> int: ...

    @property
    def dtype(self) -> str | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def windows(self) -> tuple[int, ...]: ...

    @property
    def num_recurrent_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def pooling(self) -> Pooling | None: ...

    @property
    def moe(self) -> MoeConfig | None: ...

    @property
    def latent(self) -> Latent | None: ...

    @property
    def quantization(self) -> Quantization | None: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def score_cap(self) -> float: ...

    @property
    def has_sinks(self) -> bool: ...


class DeviceFacts(Struct, frozen=True, kw_only=True):
    """What is known about a kind of device before one is opened. A rank measures memory and reports it in
    RankReady."""

    name: str
    page_size: int  # tokens; the page that suits its kernels
    chunk_tokens: int  # prompt tokens that keep it busy for one step without making decodes wait long
    max_running: int  # sequences beyond which a step only gets slower
    memory_fraction: float  # of free memory
    memory_reason: str
    dtypes: tuple[str, ...]
    attention_backend: str
    sampling_backends: tuple[str, ...]  # the best one first
    # sequences of the largest decode step worth capturing; 0: the device has no graphs
    graph_max_running: int
    other_dtypes: tuple[str, ...] = ()  # possible, but nothing that "auto" chooses
    page_sizes: tuple[int, ...] = ()  # that its kernels take; (): any
    latent_page_sizes: tuple[int, ...] = ()  # that those of latent attention take; (): the same
    has_kv_dtypes: bool = True  # False: keys and values are kept as they are computed
    host_copies: tuple[str, ...] = ("direct", "kernel")  # what can copy pages to and from host memory
    is_numbered: bool = False  # a machine has several, and --base-gpu-id chooses among them
    schemes: tuple[str, ...] = ()  # of quantised weights, of models/quantization_schemes.py
    has_score_caps: bool = True  # attention for models that cap their scores
    has_sinks: bool = True  # attention for models whose heads have a logit beside their scores
    offload_problem: str = ""  # why weights cannot lie in host memory while it computes; empty: they can
    has_logits: bool = True  # False: tokens come from elsewhere, and no grammar can choose among them


# the best one first
GRAMMAR_PACKAGES = {"xgrammar": "xgrammar", "llguidance": "llguidance", "outlines": "outlines_core"}

DEVICES = {
    "cpu": DeviceFacts(
        name="cpu",
        page_size=16,
        chunk_tokens=512,
        max_running=64,
        memory_fraction=0.6,
        memory_reason="a CPU's memory is shared with everything else on the machine",
        dtypes=("float32", "bfloat16", "float16"),
        attention_backend="torch_native",
        sampling_backends=("pytorch",),
        graph_max_running=0,
        schemes=SCHEMES,
        offload_problem="it computes in host memory",
    ),
    "cuda": DeviceFacts(
        name="cuda",
        page_size=64,
        chunk_tokens=8192,
        max_running=256,
        memory_fraction=0.95,
        memory_reason="what a step computes is measured and left free, the rest is for graphs",
        dtypes=("bfloat16", "float16", "float32"),
        attention_backend="triton",
        sampling_backends=("pytorch",),
        graph_max_running=256,
        is_numbered=True,
        schemes=SCHEMES,
    ),
    "npu": DeviceFacts(
        name="npu",
        page_size=128,
        chunk_tokens=4096,
        max_running=256,
        memory_fraction=0.9,
        memory_reason="what a step computes is measured and left free, the rest is for graphs and CANN",
        dtypes=("bfloat16", "float16"),
        other_dtypes=("float32",),
        attention_backend="ascend",
        sampling_backends=("ascend", "pytorch"),
        graph_max_running=128,
        page_sizes=(128, 256, 384, 512),
        latent_page_sizes=(128,),
        has_kv_dtypes=False,
        is_numbered=True,
        host_copies=("direct", "kernel", "kernel_ascend"),
        has_score_caps=False,
        has_sinks=False,
        offload_problem="its kernels want them in tiles that host memory cannot keep",
        schemes=("int8", "int8_static", "int4_weight", "int8_weight", "int4_int8"),
    ),
    "null": DeviceFacts(
        name="null",
        page_size=16,
        chunk_tokens=8192,
        max_running=256,
        memory_fraction=0.9,
        memory_reason="it holds nothing",
        dtypes=("float32", "bfloat16", "float16"),
        attention_backend="torch_native",
        sampling_backends=("pytorch",),
        graph_max_running=0,
        schemes=SCHEMES,
        has_logits=False,
        offload_problem="it holds none",
    ),
}


class MachineFacts(Struct, frozen=True, kw_only=True):
    """What is known about the machine that the runtime runs on."""

    cores: int  # that this process may use
    memory_bytes: int  # available, within the limit of the control group
    entropy: int  # a fresh random number, for seeds
    environment: dict[str, str] = {}  # of what RANK_VARIABLES names
    grammar_backends: tuple[str, ...] = ("xgrammar", "llguidance", "outlines")  # that are installed


def best_device(root: Path = Path("/")) -> str:
    """The name of the device that "auto" means on this machine: where there are the files of a driver, and
    the packages for it."""
    for name, files, has_packages in (
        ("npu", "davinci[0-9]*", _has_torch_npu),
        ("cuda", "nvidia[0-9]*", _has_torch_cuda),
    ):
        if any((root / "dev").glob(files)) and has_packages():
            return name
    return "cpu"


def _has_torch_npu() -> bool:
    return find_spec("torch_npu") is not None


def _has_torch_cuda() -> bool:
    """Whether torch is built for cards, without importing it."""
    torch = find_spec("torch")
    return (
        find_spec("triton") is not None
        and torch is not None
        and torch.origin is not None
        and (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()
    )


def device_facts(name: str) -> DeviceFacts:
    """Raises OptionsError for a device that is not in the table."""
    if name == "auto":
        name = best_device()
    if name not in DEVICES:
        raise OptionsError([f"--device {name} is unknown; choose one of {', '.join(sorted(DEVICES))}"])
    return DEVICES[name]


def this_machine() -> MachineFacts:
    """Reads the machine once; everything after it is a pure function of the result."""
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_available_bytes(),
        entropy=int.from_bytes(os.urandom(4), "little"),
        environment={name: os.environ[name] for name, _, _ in RANK_VARIABLES.values() if name in os.environ},
        grammar_backends=tuple(
            name for name, package in GRAMMAR_PACKAGES.items() if find_spec(package) is not None
        ),
    )


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        available = min(available, int(text) - int(used.read_text(encoding="ascii")))
    return max(available, 0)
