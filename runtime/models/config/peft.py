"""LoRA adapter folders as PEFT writes them: adapter_config.json and adapter_model.safetensors. Reads names
and shapes, but no numbers.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. An adapter that does more than W + scale
* B A is refused.
"""

import os
import re
from collections.abc import Iterable
from hashlib import sha256
from math import prod, sqrt
from os import SEEK_END
from pathlib import Path
from typing import Annotated as A
from typing import Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from runtime.errors import ModelError
from runtime.json_value import JsonValue
from runtime.models.config.renames import Renames
from runtime.regular_file import open_regular, read_regular

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_HEADER = 1 << 26  # bytes
MAX_CONFIG = 1 << 20
NUM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# A pattern's repetitions: more of them, or one of a group, could take for ever to match.
MAX_REPEATS = 3
_REPEATS = re.compile(r"(?<!\\)[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_TENSOR = re.compile(
    r"^(?:base_model\.model\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?"
    r"(.+)\.lora_([AB])\.(?:default\.)?weight$"
)
# initializations that change the base model's weights
_ELSEWHERE = re.compile(r"(pissa|olora|corda|lora_ga)", re.IGNORECASE)

T = TypeVar("T")
Shape = tuple[int, ...]
Rank = A[int, Meta(ge=1, le=1 << 16)]
Alpha = A[float, Meta(ge=-1e6, le=1e6)]


class PeftConfig(Struct, frozen=True, kw_only=True):
    """The part of adapter_config.json that matters here. What follows from the tensors is not read."""

    peft_type: str = "LORA"
    r: Rank = 8
    lora_alpha: Alpha = 8
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    bias: str = "none"
    init_lora_weights: JsonValue = True
    use_dora: bool = False  # this field and those below: refused where they are set (REFUSED)
    use_qalora: bool = False
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    layer_replication: JsonValue = None
    alora_invocation_tokens: JsonValue = None
    trainable_token_indices: JsonValue = None
    target_parameters: JsonValue = None


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


class _Entry(Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: Literal["F64", "F32", "F16", "BF16"]
    shape: tuple[A[int, Meta(ge=0, le=2**31 - 1)], ...]
    data_offsets: tuple[A[int, Meta(ge=0, le=2**62)], A[int, Meta(ge=0, le=2**62)]]


class Pair(Struct, frozen=True):
    """A and B of one module. The product scale * B A is added to the module's weight."""

    a: str  # name of the tensor A; b: of B
    b: str
    rank: int
    scale: float


class Adapter(Struct, frozen=True):
    """The adapter in a folder. `digest`: a hash of its files; two folders with the same digest hold the same
    adapter."""

    folder: str
    pairs: dict[str, Pair]  # by module, as `layers.0.self_attn.q_proj`
    digest: str
    stamp: tuple[tuple[int, int], ...] | None  # of its files, from before they were read

    @property
    def rank(self) -> int:
        """The largest rank of its pairs."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def targets(self) -> set[str]:
        """Last names of the modules that it changes."""
        return {module.rpartition(".")[2] for module in self.pairs}


def read_adapter(folder: str, modules: dict[str, tuple[int, int]], renames: Renames = ()) -> Adapter:
    """`modules`: (inputs, outputs) of all modules that adapters may change; `renames`: parts of their names
    in adapters -> those in `modules`. Raises ModelError, in which no path occurs."""
    read_from = stamp(folder)
    config = _read_config(Path(folder))
    by_module: dict[str, dict[str, tuple[str, Shape]]] = {}
    given_names: dict[str, str] = {}  # of modules, in the adapter
    for name, shape in _read_shapes(Path(folder) / WEIGHTS).items():
        match = _TENSOR.match(name)
        if match is None:
            raise ModelError(
                f"the adapter has a tensor {name}, which is not of a linear layer's lora_A or lora_B; "
                "embeddings, heads and "
                "layers trained in full are not supported"
            )
        module = _renamed(match[1], renames)
        if module not in modules:
            raise ModelError(
                f"the adapter changes {match[1]}, which this model lacks or where adapters are not "
                "supported; they can change "
                f"{', '.join(sorted({module.rpartition('.')[2] for module in modules})) or 'nothing'}"
            )
        by_module.setdefault(module, {})[match[2]] = name, shape
        given_names[module] = match[1]
    if not by_module:
        raise ModelError(f"{WEIGHTS} of the adapter holds no tensors")
    pairs = {
        module: _pair(config, given_names[module], pair_tensors, modules[module])
        for module, pair_tensors in by_module.items()
    }
    try:
        return Adapter(folder, pairs, _digest(Path(folder)), read_from)
    except OSError as error:
        raise ModelError(f"the adapter changed while it was read ({error.strerror}); load it again") from None


def _renamed(module: str, renames: Renames) -> str:
    """The module's name as the model has it."""
    path = f"{module}."
    for old, new in renames:
        path = path.replace(old, new)
    return path.removesuffix(".")


def _pair(
    config: PeftConfig, module: str, pair_tensors: dict[str, tuple[str, Shape]], sizes: tuple[int, int]
) -> Pair:
    if pair_tensors.keys() != {"A", "B"}:
        raise ModelError(f"the adapter has only one of lora_A and lora_B of {module}")
    (a, a_shape), (b, b_shape) = pair_tensors["A"], pair_tensors["B"]
    rank = _by_pattern(config.rank_pattern, module, config.r)
    inputs, outputs = sizes
    if a_shape != (rank, inputs) or b_shape != (outputs, rank):
        raise ModelError(
            f"the adapter's {module} has shapes {list(a_shape)} and {list(b_shape)}, but rank {rank} and "
            "this model ask for "
            f"{[rank, inputs]} and {[outputs, rank]}; it was made for another model"
        )
    alpha = _by_pattern(config.alpha_pattern, module, config.lora_alpha)
    return Pair(a, b, rank, alpha / (sqrt(rank) if config.use_rslora else rank))


def _by_pattern(pattern: dict[str, T] | None, module: str, default: T) -> T:
    """The value of the first key that the module's full name ends with; keys are regular expressions, as in
    PEFT."""
    for key, value in (pattern or {}).items():
        if len(_REPEATS.findall(key)) > MAX_REPEATS or _REPEATED_GROUP.search(key):
            raise ModelError(f"{CONFIG} has a pattern that repeats too much: {key[:80]}; name the modules")
        try:
            if re.match(rf"(?:.*\.)?(?:{key.removeprefix('^')})$", f"model.{module}"):
                return value
        except (re.error, RecursionError, OverflowError):
            raise ModelError(f"{CONFIG} has a pattern that is no regular expression: {key[:80]}") from None
    return default


def _read_config(folder: Path) -> PeftConfig:
    try:
        config = msgspec.json.decode(read_regular(folder / CONFIG, MAX_CONFIG), type=PeftConfig)
    except OSError as error:
        raise ModelError(
            f"{CONFIG} of the adapter cannot be read ({error.strerror}); give a folder that PEFT has written"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
            f"the adapter belongs to changed base weights ({CONFIG}: init_lora_weights "
            f"{config.init_lora_weights}); "
            "convert it to a plain one when saving (path_initial_model_for_weight_conversion)"
        )
    return config


def _read_shapes(path: Path) -> dict[str, Shape]:
    """Shapes of the tensors in a safetensors file, whose header is JSON behind its length."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= MAX_HEADER:
                raise ModelError(f"{WEIGHTS} of the adapter is damaged or cut short; get it again")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            num_bytes = file.seek(0, SEEK_END) - 8 - length
            entries = {name: _entry(raw) for name, raw in header.items() if name != "__metadata__"}
    except OSError as error:
        raise ModelError(
            f"{WEIGHTS} of the adapter cannot be read ({error.strerror}); *.bin files are not"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ModelError(f"{WEIGHTS} of the adapter is damaged or cut short; get it again") from None
    if not _is_gapless(entries.values(), num_bytes):
        raise ModelError(f"{WEIGHTS} of the adapter is damaged or cut short; get it again")
    return {name: entry.shape for name, entry in entries.items()}


def _is_gapless(entries: Iterable[_Entry], num_bytes: int) -> bool:
    """Whether the tensors lie one behind the other, from the first of `num_bytes` to the last."""
    at = 0
    for entry in sorted(entries, key=lambda entry: entry.data_offsets):
        if entry.data_offsets != (at, at + prod(entry.shape) * NUM_BYTES[entry.dtype]):
            return False
        at = entry.data_offsets[1]
    return at == num_bytes


def _entry(raw: msgspec.Raw) -> _Entry:
    return msgspec.json.decode(raw, type=_Entry)


def stamp(folder: str) -> tuple[tuple[int, int], ...] | None:
    """Sizes and dates of an adapter's files, by which a change of them shows; None: one is missing. Reads
    nothing of them."""
    try:
        found = [os.stat(Path(folder, name)) for name in (CONFIG, WEIGHTS)]
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    return tuple((file.st_size, file.st_mtime_ns) for file in found)


def _digest(folder: Path) -> str:
    digest = sha256(read_regular(folder / CONFIG, MAX_CONFIG))
    with open_regular(folder / WEIGHTS) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()[:32]
