"""The task of a checkpoint: to generate, to embed (the pooling of sentence-transformers folders is read), or
to classify. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from runtime.errors import ModelError
from runtime.json_value import Fields, JsonValue
from runtime.models.config.dense_modules import read_dense
from runtime.models.config.judge import read_judge
from runtime.models.config.pooling import Activation, Pooling, PoolingMode
from runtime.regular_file import read_regular

T = TypeVar("T")
REWARDS = ("ForRewardModel", "ForProcessRewardModel")
STEP_TOKEN = "<extra_0>"  # of Qwen2.5-Math-PRM
GENERATES, EMBEDS, CLASSIFIES = "ForCausalLM", ("Model", "ForMaskedLM"), "ForSequenceClassification"
LM_HEAD = "LMHeadModel"  # end of the names of old models that generate
MODES: dict[str, PoolingMode] = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}  # names of sentence-transformers
OWN_MODES: dict[str, PoolingMode] = {"last": "last", "mean": "mean", "cls": "cls"}  # by values of --pooling
OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# by torch's class names
ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
PROBLEMS: dict[str, Activation] = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}
# modules of a sentence-transformers folder that are served
NO_MODULES = {"Transformer", "Pooling", "Dense", "Normalize", "Dropout"}


def family_of(architecture: str) -> str:
    """The architecture's name without its end: Qwen3ForCausalLM and Qwen3Model are both Qwen3."""
    return next(
        (
            architecture.removesuffix(end)
            for end in (GENERATES, LM_HEAD, CLASSIFIES, *REWARDS, "ForMaskedLM", "Model")
            if architecture.endswith(end)
        ),
        architecture,
    )


class PoolingOptions(NamedTuple):
    """What the operator says about pooling."""

    is_embedding: bool  # use a generating model for embeddings
    mode: str  # the value of --pooling


def read_pooling(
    folder: Path,
    architecture: str,
    hidden_size: int,
    options: PoolingOptions,
    *,
    is_causal: bool,
    fields: Mapping[str, JsonValue],
) -> Pooling | None:
    """None: the model generates. `fields`: config.json. Raises ModelError for pooling that is not
    supported."""
    judge_ids = read_judge(folder, fields) if is_causal and not options.is_embedding else ()
    if judge_ids:
        return Pooling(
            task="classify",
            mode="last",
            is_whole=False,
            size=1,
            labels=("relevant",),
            activation="sigmoid",
            judge_ids=judge_ids,
        )
    if architecture.endswith(REWARDS):
        return _reward(architecture)
    if architecture.endswith(CLASSIFIES):
        return _classifier(folder, options.mode, is_causal)
    generates = architecture.endswith(LM_HEAD) or not architecture.endswith(EMBEDS)
    if generates and not options.is_embedding:
        return None
    mode, is_normalised, names = _modules(folder, options.mode, "last" if is_causal else "mean")
    dense = read_dense(folder, names, hidden_size)
    return Pooling(
        task="embed",
        mode=mode,
        is_whole=is_whole(mode, is_causal=is_causal),
        size=dense[-1].outputs if dense else hidden_size,
        dense=dense,
        is_normalised=is_normalised,
    )


def _reward(architecture: str) -> Pooling:
    """A reward of a text, or of the steps of one: probabilities of the last one being wrong and right."""
    is_process = architecture.endswith("ForProcessRewardModel")
    return Pooling(
        task="classify",
        mode="last",
        is_whole=False,
        size=2 if is_process else 1,
        labels=("wrong", "right") if is_process else ("reward",),
        activation="softmax" if is_process else "none",
        step_token=STEP_TOKEN if is_process else "",
        has_inner_head=family_of(architecture) == "Qwen2",
    )


def longest_text(folder: Path, longest: int) -> int:
    """Longest text in tokens: max_seq_length of sentence_bert_config.json, if that is less than `longest`."""
    value = read_object(folder / "sentence_bert_config.json").get("max_seq_length")
    return min(longest, value) if isinstance(value, int) and value > 0 else longest


def read_object(path: Path) -> Fields:
    """A JSON object; {} where there is no file. Raises ModelError for a file that cannot be read."""
    return _read(path, Fields) if path.is_file() else {}


def is_whole(mode: PoolingMode, *, is_causal: bool) -> bool:
    """Whether a text must be computed in one step. A causal model's last token has seen the whole text, so
    with mode "last" a text may be computed in chunks."""
    return not is_causal or mode != "last"


def _classifier(folder: Path, mode: str, is_causal: bool) -> Pooling:
    raw = read_object(folder / "config.json")
    names = raw.get("id2label")
    count = len(names) if isinstance(names, dict) and names else int(raw.get("num_labels", 2))
    labels = tuple(str((names or {}).get(str(i), f"LABEL_{i}")) for i in range(count))
    own: PoolingMode = "last" if is_causal else "mean" if raw.get("classifier_pooling") == "mean" else "cls"
    if mode not in ("auto", own):
        raise ModelError(
            f"--pooling {mode} is not possible: the model's head takes the {own} token; leave it out"
        )
    return Pooling(
        task="classify",
        mode=own,
        is_whole=is_whole(own, is_causal=is_causal),
        size=count,
        labels=labels,
        activation=_activation(folder, raw, count, is_causal),
    )


def _activation(folder: Path, raw: Fields, count: int, is_causal: bool) -> Activation:
    """The activation that the folder names. Otherwise a single score is a logit in a cross-encoder, and
    elsewhere a reward, which has no bounds."""
    nested = raw.get("sentence_transformers")
    value = (
        (nested.get("activation_fn") if isinstance(nested, dict) else None)
        or raw.get("sbert_ce_default_activation_function")
        or read_object(folder / "config_sentence_transformers.json").get("activation_fn")
    )
    if isinstance(value, str) and (known := ACTIVATIONS.get(value.rpartition(".")[2])) is not None:
        return known
    if raw.get("problem_type") in PROBLEMS:
        return PROBLEMS[raw["problem_type"]]
    return "softmax" if count > 1 else "none" if is_causal else "sigmoid"


def _modules(folder: Path, requested: str, default: PoolingMode) -> tuple[PoolingMode, bool, tuple[str, ...]]:
    """Pooling mode (`requested`, unless that is auto), whether vectors are normalized, and folders of linear
    layers, by modules.json. Without that file: `default`, and vectors are normalized. Raises ModelError for
    modules that are not supported."""
    path, chosen = folder / "modules.json", OWN_MODES.get(requested)
    if not path.is_file():
        return chosen or default, True, ()
    entries = [
        (str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path", "")))
        for entry in _read(path, list[Fields])
    ]
    modules = {kind: folder / name for kind, name in entries}
    dense = tuple(name for kind, name in entries if kind == "Dense")
    kinds = [kind for kind, _ in entries if kind in ("Dense", "Normalize")]
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in dense):
        raise ModelError("modules.json: path of a Dense module must be a folder of the model")
    if dense and "Normalize" in kinds and kinds.index("Normalize") < len(dense):
        raise ModelError("modules.json has Normalize before Dense, which is not supported")
    if unknown := modules.keys() - NO_MODULES:
        raise ModelError(
            f"modules.json asks for {', '.join(sorted(unknown))}, which is not supported; "
            f"supported are {', '.join(sorted(NO_MODULES))}"
        )
    if chosen is not None:
        return chosen, "Normalize" in modules, dense
    raw = read_object(modules["Pooling"] / "config.json") if "Pooling" in modules else {}
    value = raw.get("pooling_mode") or [
        name for name, value in raw.items() if name in OLD_MODES and value is True
    ]
    names = [OLD_MODES.get(str(name), str(name)) for name in ([value] if isinstance(value, str) else value)]
    known = [(MODES | OWN_MODES).get(name) for name in names] or [default]
    if len(known) != 1 or known[0] is None:
        asked = " and ".join(MODES.get(name, name) for name in names)
        raise ModelError(
            f"1_Pooling/config.json asks for {asked}; supported is one of {', '.join(MODES.values())}: "
            "choose with --pooling"
        )
    return known[0], "Normalize" in modules, dense


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(read_regular(path), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ModelError(
            f"{path.name} cannot be read: {error}; restore the file from the model's source"
        ) from None
