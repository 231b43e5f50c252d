"""Facts about the model, the device and the machine, which derivations and rules depend on in addition to the
options. Data, no hooks."""

import os
import resource
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from runtime.devices.ascend import facts as ascend
from runtime.devices.cgroup import available_bytes
from runtime.devices.cores import usable_cores
from runtime.devices.cpu import facts as cpu
from runtime.devices.cuda import facts as cuda
from runtime.devices.facts import DeviceFacts
from runtime.devices.null import facts as null
from runtime.errors import OptionsError
from runtime.json_value import JsonDict
from runtime.models.config.block import ScoreKind
from runtime.models.config.diffusion_families import BlockDiffusion
from runtime.models.config.media_config import MediaConfig
from runtime.models.config.mla_config import MlaConfig
from runtime.models.config.moe_config import MoeConfig
from runtime.models.config.pooling import Pooling
from runtime.models.config.quantization_config import Quantization
from runtime.options.compat.environment import RANK_VARIABLES
from runtime.storage.settings import cache_folder

MOST_OPEN_FILES = 65_536  # that this process makes use of


class ModelWidths(Protocol):
    """Sizes of a model that options depend on."""

    @property
    def vocab_size(self) -> int:
        """Token ids of the vocabulary."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        ...

    @property
    def num_heads(self) -> int:
        """Attention heads."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        ...

    @property
    def longest_head(self) -> int:
        """Size of an attention head, of the largest where layers differ."""
        ...

    @property
    def head_sizes(self) -> frozenset[int]:
        """Sizes of keys and values of attention heads, in all layers."""
        ...


class MediaFacts(Protocol):
    """What a model takes besides text."""

    @property
    def media(self) -> MediaConfig | None:
        """Encoder of images; None: the model takes text alone."""
        ...


class ModelFacts(MediaFacts, ModelWidths, Protocol):
    """The part of runtime.models.config.model_config.ModelConfig that options depend on."""

    @property
    def context_len(self) -> int:
        """Longest context, in tokens."""
        ...

    @property
    def dtype(self) -> str | None:
        """The checkpoint's dtype; None: config.json names none."""
        ...

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding window of each layer, in tokens; 0: full attention."""
        ...

    @property
    def num_recurrent_layers(self) -> int:
        """Layers whose sequences keep a state."""
        ...

    @property
    def pooling(self) -> Pooling | None:
        """How tokens become a vector; None: the model generates."""
        ...

    @property
    def moe(self) -> MoeConfig | None:
        """Experts of the model; None: it is dense."""
        ...

    @property
    def transformers_json(self) -> JsonDict | None:
        """config.json of a model that transformers' code computes; None: this runtime's own code does."""
        ...

    @property
    def mla(self) -> MlaConfig | None:
        """Latent attention (MLA); None: the model has none."""
        ...

    @property
    def quantization(self) -> Quantization | None:
        """Quantization of the checkpoint; None: plain weights."""
        ...

    @property
    def diffusion(self) -> BlockDiffusion | None:
        """Blocks of tokens that the model fills in; None: it samples one token after the other."""
        ...

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """By layer, the index of the layer whose keys and values it attends to; (): each has its own."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """Whether layers share blocks, which are given the embeddings of the tokens."""
        ...

    @property
    def scores(self) -> ScoreKind:
        """What attention scores have besides their scale."""
        ...


# the best one first
GRAMMAR_PACKAGES = {"llguidance": "llguidance", "xgrammar": "xgrammar", "outlines": "outlines_core"}

DEVICES = {facts.name: facts for facts in (cpu.FACTS, cuda.FACTS, ascend.FACTS, null.FACTS)}


class MachineFacts(Struct, frozen=True, kw_only=True):
    """The machine that the runtime runs on."""

    cores: int  # physical ones that this process may use, within its quota
    memory_bytes: int  # available, within the limit of the control group
    entropy: int  # a fresh random number, for seeds
    open_files: int = 4096  # that this process may have, once it has raised its own limit
    cache_folder: str = "/var/cache/runtime"  # ours, in the user's caches
    environment: dict[str, str] = {}  # variables of RANK_VARIABLES that are set
    grammar_backends: tuple[str, ...] = (
        "llguidance",
        "xgrammar",
        "outlines",
    )  # installed libraries, the best one first


def best_device(root: Path = Path("/")) -> str:
    """The name of the device that "auto" stands for on this machine: one with device files and installed
    packages, else cpu."""
    for name, files, has_packages in ACCELERATORS:
        if any((root / "dev").glob(files)) and has_packages():
            return name
    return "cpu"


def missing_device(name: str, root: Path = Path("/")) -> str | None:
    """Why ranks cannot open a device on this machine, as far as can be seen without them; None: they may."""
    for device, files, has_packages in ACCELERATORS:
        if name == device and not (any((root / "dev").glob(files)) and has_packages()):
            return f"--device {name} is not on this machine (/dev/{files}, packages): no server starts here"
    return None


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


# name, device files and whether its packages are installed; the best one first
ACCELERATORS = (("npu", "davinci[0-9]*", _has_torch_npu), ("cuda", "nvidia[0-9]*", _has_torch_cuda))


def device_facts(name: str) -> DeviceFacts:
    """The facts of a device by name, or of the best one for "auto". Raises OptionsError for an unknown
    name."""
    if name == "auto":
        name = best_device()
    if name not in DEVICES:
        raise OptionsError([f"--device {name} is unknown; choose one of {', '.join(sorted(DEVICES))}"])
    return DEVICES[name]


def this_machine() -> MachineFacts:
    """Reads the machine; all else is a pure function of the result."""
    return MachineFacts(
        cores=usable_cores(),
        memory_bytes=available_bytes(),
        entropy=int.from_bytes(os.urandom(4), "little"),
        open_files=_most_open_files(),
        cache_folder=str(cache_folder()),
        environment={name: os.environ[name] for name, _, _ in RANK_VARIABLES.values() if name in os.environ},
        grammar_backends=tuple(
            name for name, package in GRAMMAR_PACKAGES.items() if find_spec(package) is not None
        ),
    )


def _most_open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
