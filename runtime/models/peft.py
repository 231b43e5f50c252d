"""Adapter folders as PEFT writes them: adapter_config.json and adapter_model.safetensors. Reads names and
shapes, no numbers.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. An adapter that does more than W + scale
* B A is refused.
"""

import re
from hashlib import sha256
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from runtime.errors import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_HEADER = 1 << 26  # bytes
_TENSOR = re.compile(r"^(?:base_model\.model\.)?(?:model\.)?(.+)\.lora_([AB])\.(?:default\.)?weight$")
# begin by changing the base model's weights
_ELSEWHERE = re.compile(r"(pissa|olora|corda|lora_ga)", re.IGNORECASE)

Shape = tuple[int, ...]


class PeftConfig(Struct, frozen=True, kw_only=True):
    """The part of adapter_config.json that matters here. What the tensors say themselves is not read."""

    peft_type: str = "LORA"
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    init_lora_weights: Any = True
    use_dora: bool = False  # this and those below: refused where they say anything
    use_qalora: bool = False
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    layer_replication: Any = None
    alora_invocation_tokens: Any = None
    trainable_token_indices: Any = None
    target_parameters: Any = None


REFUSED = {
    "use_dora": "DoRA scales whole columns, which is more than a low-rank sum",
    "use_qalora": "QALoRA groups its inputs",
    "lora_bias": "it has biases",
    "modules_to_save": "it brings whole layers of its own",
    "layer_replication": "it repeats layers",
    "alora_invocation_tokens": "it is switched on by tokens",
    "trainable_token_indices": "it changes embeddings of tokens",
    "target_parameters": "it changes tensors of experts",
}


class Pair(Struct, frozen=True):
    """A B of one module; the product of `scale`, B and A is added to its weight."""

    a: str  # names of the tensors
    b: str
    rank: int
    scale: float


class Adapter(Struct, frozen=True):
    """What a folder holds. `digest` says which numbers: two folders of the same one are the same adapter."""

    folder: str
    pairs: dict[str, Pair]  # by module, as `layers.0.self_attn.q_proj`
    digest: str

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())

    @property
    def targets(self) -> set[str]:
        """Last names of the modules that it changes."""
        return {module.rpartition(".")[2] for module in self.pairs}


def read_adapter(folder: str, modules: dict[str, tuple[int, int]]) -> Adapter:
    """`modules`: inputs and outputs of all that may be changed. Raises ModelError, which names no path."""
    config = _read_config(Path(folder))
    found: dict[str, dict[str, tuple[str, Shape]]] = {}
    for name, shape in _read_shapes(Path(folder) / WEIGHTS).items():
        match = _TENSOR.match(name)
        if match is None:
            raise ModelError(
                f"the adapter has a tensor {name}, which is not of a linear layer's lora_A or lora_B; embeddings, heads and "
                "layers trained in full are not supported"
            )
        if match[1] not in modules:
            raise ModelError(
                f"the adapter changes {match[1]}, which this model lacks or where adapters are not supported; they can change "
                f"{', '.join(sorted({module.rpartition('.')[2] for module in modules})) or 'nothing'}"
            )
        found.setdefault(match[1], {})[match[2]] = name, shape
    if not found:
        raise ModelError(f"{WEIGHTS} of the adapter holds no tensors")
    pairs = {module: _pair(config, module, sides, modules[module]) for module, sides in found.items()}
    return Adapter(folder, pairs, _digest(Path(folder)))


def _pair(
    config: PeftConfig, module: str, sides: dict[str, tuple[str, Shape]], sizes: tuple[int, int]
) -> Pair:
    if sides.keys() != {"A", "B"}:
        raise ModelError(f"the adapter has only one of lora_A and lora_B of {module}")
    (a, a_shape), (b, b_shape) = sides["A"], sides["B"]
    rank = _by_pattern(config.rank_pattern, module, config.r)
    inputs, outputs = sizes
    if a_shape != (rank, inputs) or b_shape != (outputs, rank):
        raise ModelError(
            f"the adapter's {module} has shapes {list(a_shape)} and {list(b_shape)}, but rank {rank} and this model ask for "
            f"{[rank, inputs]} and {[outputs, rank]}; it was made for another model"
        )
    alpha = _by_pattern(config.alpha_pattern, module, config.lora_alpha)
    return Pair(a, b, rank, alpha / (sqrt(rank) if config.use_rslora else rank))


def _by_pattern(pattern: dict[str, Any] | None, module: str, default: Any) -> Any:
    """As PEFT looks them up: the first key that the module's full name ends with, as an expression."""
    for key, value in (pattern or {}).items():
        try:
            if re.match(rf"(?:.*\.)?(?:{key.removeprefix('^')})$", f"model.{module}"):
                return value
        except re.error:
            raise ModelError(f"{CONFIG} has a pattern that is no regular expression: {key}") from None
    return default


def _read_config(folder: Path) -> PeftConfig:
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=PeftConfig)
    except OSError as error:
        raise ModelError(
            f"{CONFIG} of the adapter cannot be read ({error.strerror}); give a folder that PEFT has written"
        ) from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"{CONFIG} of the adapter is not as PEFT writes it: {error}") from None
    if config.peft_type != "LORA":
        raise ModelError(f"the adapter is of type {config.peft_type}; only LORA is supported")
    for name, why in REFUSED.items():
        if getattr(config, name):
            raise ModelError(f"the adapter has {name} in {CONFIG}, which is not supported: {why}")
    if config.bias != "none":
        raise ModelError(f"the adapter trains biases ({CONFIG}: bias {config.bias}), which is not supported")
    if isinstance(config.init_lora_weights, str) and _ELSEWHERE.match(config.init_lora_weights):
        raise ModelError(
            f"the adapter belongs to changed base weights ({CONFIG}: init_lora_weights {config.init_lora_weights}); "
            "convert it to a plain one when saving (path_initial_model_for_weight_conversion)"
        )
    return config


def _read_shapes(path: Path) -> dict[str, Shape]:
    """Of the tensors in a safetensors file: its header is JSON behind its length."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= MAX_HEADER:
                raise ModelError(f"{WEIGHTS} of the adapter is damaged or cut short; get it again")
            header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
    except OSError as error:
        raise ModelError(
            f"{WEIGHTS} of the adapter cannot be read ({error.strerror}); *.bin files are not"
        ) from None
    except msgspec.MsgspecError:
        raise ModelError(f"{WEIGHTS} of the adapter is damaged or cut short; get it again") from None
    return {name: tuple(entry.get("shape", ())) for name, entry in header.items() if name != "__metadata__"}


def _digest(folder: Path) -> str:
    whole = sha256((folder / CONFIG).read_bytes())
    with open(folder / WEIGHTS, "rb") as file:
        while piece := file.read(1 << 20):
            whole.update(piece)
    return whole.hexdigest()[:32]
