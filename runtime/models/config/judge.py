"""Language models that judge: a reranker whose score of a query and a document is how much likelier "yes"
comes next than "no" (Qwen3-Reranker). Torch-free.

The tokens are those of sentence-transformers' module LogitScore, where the folder has it. Otherwise
config.json names them, as `"classifier_from_token": ["no", "yes"]`, which --json-model-override-args can set.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import JsonValue
from runtime.regular_file import read_regular

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


class Module(Struct):
    """An entry of modules.json."""

    type: str = ""
    path: str = ""


class LogitScore(Struct):
    """config.json of the module."""

    true_token_id: int
    false_token_id: int | None = None


class Vocabulary(Struct):
    """The vocabulary in tokenizer.json."""

    vocab: dict[str, int] = {}


class TokenizerFile(Struct):
    """The part of tokenizer.json that is read here."""

    model: Vocabulary


def read_judge(folder: Path, fields: Mapping[str, JsonValue]) -> tuple[int, ...]:
    """Token ids as Pooling.judge_ids; (): the model does not judge. `fields`: config.json. Raises ModelError
    for files that cannot be read and for tokens that the vocabulary lacks."""
    try:
        path = folder / "modules.json"
        modules = msgspec.json.decode(read_regular(path), type=list[Module]) if path.is_file() else []
        found = next((one for one in modules if one.type.rpartition(".")[2] == "LogitScore"), None)
        if found is not None:
            path = folder / found.path / "config.json"
            score = msgspec.json.decode(read_regular(path), type=LogitScore)
            return tuple(one for one in (score.true_token_id, score.false_token_id) if one is not None)
        names = fields.get("classifier_from_token")
        if names is None:
            return ()
        path = folder / "tokenizer.json"
        vocabulary = msgspec.json.decode(read_regular(path), type=TokenizerFile).model.vocab
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}; restore it from the model's source") from None
    if not isinstance(names, list) or len(names) != 2 or not all(str(name) in vocabulary for name in names):
        raise ModelError(
            f"config.json: classifier_from_token {names} must be two tokens of the vocabulary, as "
            '["no", "yes"]'
        )
    no, yes = (vocabulary[str(name)] for name in names)
    return yes, no


def judge_prompt(query: str, document: str, instruction: str | None) -> str:
    """The prompt of Qwen3-Reranker for one document, behind which the model says yes or no."""
    asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
