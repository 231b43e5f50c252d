"""What a folder's model is made for."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ModelError
from runtime.models.config import registry
from runtime.models.config.model_config import read_config
from runtime.models.config.pooling import Pooling
from tests.models.make_pooled import write_modules

BERT = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def write(folder: Path, architecture: str, **more: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(BERT | {"architectures": [architecture]} | more))
    return folder


def pooling(folder: Path, **options: Any) -> Pooling:
    found = read_config(folder, **options).pooling
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("architecture", "mode", "is_whole"),
    [
        ("BertModel", "mean", True),
        ("RobertaForMaskedLM", "mean", True),
        ("Qwen3Model", "last", False),
        ("LlamaModel", "last", False),
    ],
)
def test_bare_models_embed(tmp_path: Path, architecture: str, mode: str, is_whole: bool) -> None:
    found = pooling(write(tmp_path, architecture))
    assert (found.task, found.mode, found.is_whole, found.is_normalised, found.size) == (
        "embed",
        mode,
        is_whole,
        True,
        8,
    )


def test_models_that_generate_embed_when_configured(tmp_path: Path) -> None:
    folder = write(tmp_path, "Qwen2ForCausalLM")
    assert read_config(folder).pooling is None
    assert pooling(folder, is_embedding=True).mode == "last"
    assert pooling(folder, is_embedding=True, pooling="mean").is_whole


@pytest.mark.parametrize(
    "config", [{"pooling_mode": "cls"}, {"pooling_mode": ["cls"]}, {"pooling_mode_cls_token": True}]
)
def test_both_forms_of_pooling(tmp_path: Path, config: dict[str, Any]) -> None:
    write_modules(write(tmp_path, "BertModel"), "", normalize=False, **config)
    assert (pooling(tmp_path).mode, pooling(tmp_path).is_normalised) == ("cls", False)
    assert pooling(tmp_path, pooling="last").mode == "last"


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode": "max"},
        {"pooling_mode": ["cls", "mean"]},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
    ],
)
def test_unknown_pooling_is_refused_unless_overruled(tmp_path: Path, config: dict[str, Any]) -> None:
    write_modules(write(tmp_path, "BertModel"), "", **config)
    with pytest.raises(ModelError, match="choose with --pooling"):
        read_config(tmp_path)
    assert pooling(tmp_path, pooling="mean").mode == "mean"


def test_modules_that_compute_more_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "BertModel")
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.LSTM", "path": "2_LSTM"}])
    )
    with pytest.raises(ModelError, match="LSTM"):
        read_config(tmp_path)


def test_the_longest_text_is_what_the_folder_says(tmp_path: Path) -> None:
    write(tmp_path, "RobertaModel", pad_token_id=1, type_vocab_size=1)
    assert read_config(tmp_path).context_len == 62
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    assert read_config(tmp_path).context_len == 20


@pytest.mark.parametrize(
    ("architecture", "more", "activation"),
    [
        ("BertForSequenceClassification", {}, "softmax"),
        ("BertForSequenceClassification", {"id2label": {"0": "yes"}}, "sigmoid"),
        (
            "BertForSequenceClassification",
            {"id2label": {"0": "yes"}, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}},
            "none",
        ),
        (
            "XLMRobertaForSequenceClassification",
            {
                "id2label": {"0": "x"},
                "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid",
            },
            "sigmoid",
        ),
        ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}, "sigmoid"),
        ("LlamaForSequenceClassification", {"id2label": {"0": "reward"}}, "none"),
    ],
)
def test_activations(tmp_path: Path, architecture: str, more: dict[str, Any], activation: str) -> None:
    found = pooling(write(tmp_path, architecture, **more))
    assert (found.task, found.activation, found.size) == (
        "classify",
        activation,
        len(more.get("id2label", "12")),
    )


def test_labels_by_number(tmp_path: Path) -> None:
    names = {str(i): f"n{i}" for i in range(11)}
    assert pooling(write(tmp_path, "BertForSequenceClassification", id2label=names)).labels == tuple(
        f"n{i}" for i in range(11)
    )


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"hidden_act": "x"}, "hidden_act"),
        ({"position_embedding_type": "x"}, "absolute"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 3}, "multiple"),
        ({"hidden_size": "x"}, "hidden_size"),
    ],
)
def test_encoders_that_are_not_served(tmp_path: Path, more: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read_config(write(tmp_path, "BertModel", **more))


def test_a_class_without_vectors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "POOLING_CLASSES", ("runtime.models.bert:Bert",))
    with pytest.raises(ModelError, match="Qwen2ForCausalLM cannot make embeddings"):
        read_config(write(tmp_path, "Qwen2ForCausalLM"), is_embedding=True)


def test_a_head_decides_its_own_pooling(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--pooling mean"):
        read_config(write(tmp_path, "BertForSequenceClassification"), pooling="mean")
