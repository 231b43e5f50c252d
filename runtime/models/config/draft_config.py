"""The config of a draft model, checked against that of its target. Torch-free."""

from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct, structs

from runtime.errors import ModelError
from runtime.models.config.config_files import decode, raw_files
from runtime.models.config.model_config import ModelConfig, read_config
from runtime.models.config.next_token_layers import (
    block_config,
    block_kinds,
    ignored_names,
    names_of,
    next_token_layout,
)
from runtime.models.config.quantization_schemes import SCHEMES
from runtime.models.config.registry import LLAMA, MODELS
from runtime.models.config.renames import Renames

Algorithm = Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"]
OPTION = "--speculative-draft-model-path"


class DraftFiles(Protocol):
    """What of a draft model's settings its config depends on."""

    @property
    def path(self) -> str | None:
        """The folder of the draft model; None: it is layers of the target's checkpoint."""
        ...

    @property
    def quantization(self) -> str | None:
        """The format of its weights; None: as its files say."""
        ...

    @property
    def config_file(self) -> str | None:
        """Read in place of its config.json (--decrypted-draft-config-file)."""
        ...

    @property
    def load_format(self) -> str | None:
        """How its files are read; None: as the target's."""
        ...

    @property
    def is_multi_layer(self) -> bool:
        """Whether each draft of a chain has a next-token layer of its own."""
        ...


class Speculation(Protocol):
    """What of the settings of speculation the config of a draft model depends on."""

    @property
    def algorithm(self) -> Algorithm:
        """How drafts are made."""
        ...

    @property
    def is_own(self) -> bool:
        """Whether a draft model makes them."""
        ...

    @property
    def num_steps(self) -> int:
        """Passes of the draft model for one draft."""
        ...

    @property
    def topk(self) -> int:
        """Branches of a draft at each position."""
        ...

    @property
    def draft_model(self) -> DraftFiles:
        """The model that does."""
        ...


class HeadConfig(Struct, frozen=True, kw_only=True):
    """A head that drafts behind its target (models/draft_heads.py)."""

    algorithm: Algorithm
    layers: ModelConfig  # as of a model of the head's own layers alone
    target_size: int  # of the target's hidden states
    head_vocab: int = 0  # tokens of the head's own output; 0: the target's head gives its logits
    aux_layers: tuple[
        int, ...
    ] = ()  # layers of the target whose inputs it is given; (): the last hidden state
    is_hidden_first: bool = False  # hidden state and embedding in this order
    has_norm: bool = True  # a norm stands before the target's head
    carries_normed: bool = True  # the next draft is made of what the norm gives; False: of what is before it
    renames: Renames = ()
    owns: str = ""  # pattern of the names in checkpoints that are the head's, where it is one of several
    ignored: tuple[str, ...] = ()


class DraftConfig(Struct, frozen=True):
    """A draft model: one of its own, or with `heads` a head behind its target, or several of which each makes
    one draft. `model` says the layers of them all."""

    model: ModelConfig
    heads: tuple[HeadConfig, ...] = ()


class _EagleLayers(Struct, frozen=True, kw_only=True):
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


class _HfHead(Struct, frozen=True, kw_only=True):
    """What config.json of an EAGLE head has beyond that of a model."""

    architectures: list[str] | None = None
    draft_vocab_size: int | None = None
    qkv_bias: bool | None = None
    eagle_config: _EagleLayers | None = None


def read_draft_config(
    speculation: Speculation, target: ModelConfig, schemes: tuple[str, ...] = SCHEMES
) -> DraftConfig:
    """The config of the draft model of `target`, on a device that computes these schemes. Raises ModelError
    where the two do not go together."""
    path, algorithm = speculation.draft_model.path, speculation.algorithm
    if algorithm == "NEXTN" or path is None:
        return _next_token_config(speculation, path, target)
    try:
        if algorithm == "STANDALONE":
            found = DraftConfig(_own_config(speculation, path))
        else:
            found = _eagle_config(speculation, path, target)
    except ModelError as error:
        text = str(error).replace("--decrypted-config-file", "--decrypted-draft-config-file")
        raise ModelError(f"{OPTION} {path}: {text}") from error
    _check(found, path, target, speculation.topk)
    if (quantization := found.model.quantization) is not None:
        model = structs.replace(found.model, quantization=quantization.on_device(schemes))
        heads = tuple(structs.replace(head, layers=model) for head in found.heads)
        found = DraftConfig(model, heads)
    return found


def _check(found: DraftConfig, path: str, target: ModelConfig, branches: int) -> None:
    model = found.model
    if model.pooling is not None or model.encoder is not None:
        raise ModelError(f"{OPTION} {path} generates no tokens; give a model that does")
    if model.recurrent is not None and branches > 1:
        raise ModelError(
            f"--speculative-eagle-topk {branches} asks for trees of drafts, and {OPTION} {path} has "
            "recurrent layers, which go from one token to the next; take 1"
        )
    if model.vocab_size != target.vocab_size:
        raise ModelError(
            f"{OPTION} {path} has a vocabulary of {model.vocab_size} tokens, and the model one of "
            f"{target.vocab_size}; give a draft model with the same vocabulary"
        )
    if found.heads and model.hidden_size != target.hidden_size:
        raise ModelError(
            f"{OPTION} {path} is for hidden states of {model.hidden_size} numbers, and the model's have "
            f"{target.hidden_size}; give a head that was made for this model"
        )


def _own_config(speculation: Speculation, path: str) -> ModelConfig:
    files = speculation.draft_model
    quantization = None if files.quantization == "unquant" else files.quantization
    return read_config(path, quantization=quantization, config_file=files.config_file)


def _eagle_config(speculation: Speculation, path: str, target: ModelConfig) -> DraftConfig:
    """A head in a folder of its own, whose config.json is that of a small Llama."""
    files = speculation.draft_model
    raw = decode(raw_files(Path(path), files.config_file)[0], _HfHead, "config.json")
    architecture = (raw.architectures or [""])[0].replace("Eagle3", "").replace("Eagle", "")
    model = read_config(
        path,
        quantization=None if files.quantization == "unquant" else files.quantization,
        overrides={"architectures": [architecture]},
        config_file=files.config_file,
    )
    if MODELS[model.architecture] != LLAMA or model.moe is not None:
        raise ModelError(f"heads of {architecture} are not known; give one that is made of a Llama's layers")
    if raw.qkv_bias is not None:
        model = structs.replace(model, qkv_bias=raw.qkv_bias)
    is_third = speculation.algorithm == "EAGLE3"
    if is_third and model.num_layers != 1:
        raise ModelError(
            f"EAGLE3 heads of {model.num_layers} layers are not known; give one of a single layer"
        )
    head = HeadConfig(
        algorithm=speculation.algorithm,
        layers=structs.replace(model, draft_layers=0),
        target_size=target.hidden_size,
        head_vocab=raw.draft_vocab_size or 0 if is_third else 0,
        aux_layers=_aux_layers(raw.eagle_config, target.num_layers) if is_third else (),
        carries_normed=not is_third,
        renames=(("midlayer.", "layers.0."),),
        ignored=(
            r"(^|\.)embed_tokens\.",
            *((r"(^|\.)t2d$",) if is_third else (r"(^|\.)lm_head\.", r"^(model\.)?norm\.")),
        ),
    )
    return DraftConfig(head.layers, (head,))


def _aux_layers(given: _EagleLayers | None, num_layers: int) -> tuple[int, ...]:
    """Layers before which the target's hidden states are taken; a checkpoint names those behind which."""
    ids = None if given is None else given.eagle_aux_hidden_state_layer_ids
    layers = (2, num_layers // 2, num_layers - 3) if ids is None else tuple(index + 1 for index in ids)
    if not all(0 <= index <= num_layers for index in layers):
        raise ModelError(
            f"the head is given the hidden states of layers {layers}, and the model has {num_layers}; give a "
            "head that was made for this model"
        )
    return layers


def _next_token_config(speculation: Speculation, path: str | None, target: ModelConfig) -> DraftConfig:
    """The next-token layers of the target's checkpoint, or of an export that has nothing else."""
    layout = next_token_layout(target)
    count = target.draft_layers or int(path is not None)
    if layout is not None:
        count = target.draft_layers or layout.uncounted or count
    if layout is None or not count or not block_kinds(target):
        raise ModelError(
            f"--speculative-algorithm {speculation.algorithm}: the model ({target.architecture}) has no "
            f"next-token layers that are known here; give a draft model ({OPTION}), or another algorithm"
        )
    count = 1 if layout.is_single else count
    wanted = speculation.num_steps if speculation.draft_model.is_multi_layer else 1
    if wanted > count:
        raise ModelError(
            f"--enable-multi-layer-eagle with --speculative-num-steps {wanted} takes as many next-token "
            f"layers, and the model has {count}; lower --speculative-num-steps"
        )
    if layout.is_described and len(target.draft_blocks) < wanted:
        raise ModelError(
            f"--speculative-algorithm {speculation.algorithm}: layer_types of config.json name "
            f"{len(target.draft_blocks)} of the {wanted} next-token layers; restore the file from the "
            "model's source"
        )
    layers = names_of(layout, target, target.num_layers if path is None else 0, wanted)
    heads = tuple(
        HeadConfig(
            algorithm="NEXTN",
            layers=block_config(target, layout, range(i, i + 1)),
            target_size=target.hidden_size,
            head_vocab=target.vocab_size if layout.head else 0,
            is_hidden_first=layout.is_hidden_first,
            has_norm=bool(layout.norm),
            carries_normed=layout.carries_normed,
            renames=names.renames,
            owns=names.owns,
            ignored=ignored_names(layout, layers),
        )
        for i, names in enumerate(layers)
    )
    return DraftConfig(block_config(target, layout, range(wanted)), heads)
