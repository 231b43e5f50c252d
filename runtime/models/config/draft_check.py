"""Whether the draft model that options name is there and goes with its target. Torch-free."""

from pathlib import Path

from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.config_files import decode
from runtime.models.config.draft_config import OPTION, Speculation, read_draft_config
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.weight_files import check_weight_files
from runtime.regular_file import read_regular

MAX_TOKENIZER_BYTES = 1 << 28


def check_draft_model(
    speculation: Speculation | None, target_path: str | Path, target: ModelConfig, load_format: str
) -> None:
    """The draft model, if there is one, is there and goes with its target: config, tokenizer and files of
    weights. Raises ModelError."""
    if speculation is None or not speculation.is_own:
        return
    read_draft_config(speculation, target)
    path = speculation.draft_model.path
    if path is None:
        return
    format = speculation.draft_model.load_format or load_format
    if format != "dummy":
        check_weight_files(Path(path), format)
    check_tokenizers(Path(path), Path(target_path))


def check_tokenizers(draft: Path, target: Path) -> None:
    """Where both folders have a tokenizer, each token has the same number in both. Raises ModelError."""
    files = [folder / "tokenizer.json" for folder in (draft, target)]
    if not all(file.is_file() for file in files):
        return
    raw = [read_regular(file, MAX_TOKENIZER_BYTES) for file in files]
    if raw[0] == raw[1]:
        return
    ours, theirs = (decode(one, _Tokenizer, "tokenizer.json").vocabulary() for one in raw)
    for token in ours.keys() | theirs.keys() if ours != theirs else ():
        if ours.get(token) != theirs.get(token):
            raise ModelError(
                f"{OPTION} {draft}: its tokenizer is another one than the model's ({token!r} is number "
                f"{ours.get(token)} there, and {theirs.get(token)} here); give a model with the same"
            )


class _AddedToken(Struct, frozen=True):
    id: int
    content: str


class _Vocabulary(Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(Struct, frozen=True):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []

    def vocabulary(self) -> dict[str, int]:
        """Numbers of all tokens that the model of the tokenizer knows."""
        vocab = self.model.vocab
        known = vocab if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}
        return known | {token.content: token.id for token in self.added_tokens}
